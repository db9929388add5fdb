package main

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"time"
)

const (
	slotCount = 16_384
	replyMax  = 64 << 20 // bytes of a bulk reply
	arrayMax  = 1 << 20  // elements of an array
)

// A respError is an error reply of the server.
type respError string

func (e respError) Error() string { return string(e) }

// errAbsent reports a GET of a key that has no value, or a shorter one than was written.
var errAbsent = errors.New("no value, or a shorter one than was written")

// A respClient is one connection to a Redis port.
type respClient struct {
	connection net.Conn
	reader     *bufio.Reader
	isGet      bool
	value      []byte
	buffer     []byte
}

func dialResp(address string, isGet bool, value []byte) (*respClient, error) {
	connection, err := net.DialTimeout("tcp", address, timeout)
	if err != nil {
		return nil, err
	}
	return &respClient{connection: connection, reader: bufio.NewReader(connection), isGet: isGet, value: value}, nil
}

func (c *respClient) close() { c.connection.Close() }

func (c *respClient) do(keys [][]byte) (refused []error, lost error) {
	c.buffer = c.buffer[:0]
	for _, key := range keys {
		if c.isGet {
			c.buffer = appendCommand(c.buffer, []byte("GET"), key)
		} else {
			c.buffer = appendCommand(c.buffer, []byte("SET"), key, c.value)
		}
	}
	if err := c.send(c.buffer); err != nil {
		return nil, err
	}
	for range keys {
		reply, err := readReply(c.reader)
		if err != nil {
			return nil, err
		}
		if err := c.judge(reply); err != nil {
			refused = append(refused, err)
		}
	}
	return refused, nil
}

func (c *respClient) judge(reply any) error {
	switch reply := reply.(type) {
	case respError:
		return reply
	case []byte:
		if c.isGet && len(reply) < len(c.value) {
			return errAbsent
		}
		return nil
	}
	return fmt.Errorf("expected a string, got %T", reply)
}

func (c *respClient) send(commands []byte) error {
	if err := c.connection.SetDeadline(time.Now().Add(timeout)); err != nil {
		return err
	}
	_, err := c.connection.Write(commands)
	return err
}

func appendCommand(to []byte, words ...[]byte) []byte {
	to = fmt.Appendf(to, "*%d\r\n", len(words))
	for _, word := range words {
		to = append(strconv.AppendInt(append(to, '$'), int64(len(word)), 10), "\r\n"...)
		to = append(append(to, word...), "\r\n"...)
	}
	return to
}

// readReply returns []byte (nil: null), int64, respError, or []any.
func readReply(reader *bufio.Reader) (any, error) {
	line, err := reader.ReadSlice('\n')
	if err != nil {
		return nil, err
	}
	line = bytes.TrimSuffix(line[:len(line)-1], []byte("\r"))
	if len(line) == 0 {
		return nil, errors.New("expected a reply, got an empty line")
	}
	kind, rest := line[0], line[1:]
	switch kind {
	case '+':
		return bytes.Clone(rest), nil
	case '-':
		return respError(rest), nil
	}
	number, err := strconv.ParseInt(string(rest), 10, 64)
	if err != nil {
		return nil, fmt.Errorf("expected a reply, got %q", line)
	}
	switch {
	case kind == ':':
		return number, nil
	case kind == '$' && number < 0:
		return []byte(nil), nil
	case kind == '$' && number <= replyMax:
		body := make([]byte, number+2)
		_, err := io.ReadFull(reader, body)
		return body[:number], err
	case kind == '*' && number <= arrayMax:
		elements := make([]any, 0, max(0, number))
		for range number {
			element, err := readReply(reader)
			if err != nil {
				return nil, err
			}
			elements = append(elements, element)
		}
		return elements, nil
	}
	return nil, fmt.Errorf("expected a reply, got %q", line)
}

// A slotTable has the address of each slot's leader.
type slotTable [slotCount]string

// readSlots asks a node for the leaders of all slots, as Redis Cluster clients do.
func readSlots(address string) (*slotTable, error) {
	c, err := dialResp(address, false, nil)
	if err != nil {
		return nil, err
	}
	defer c.close()
	if err := c.send(appendCommand(nil, []byte("CLUSTER"), []byte("SLOTS"))); err != nil {
		return nil, err
	}
	reply, err := readReply(c.reader)
	if err != nil {
		return nil, err
	}
	if refused, ok := reply.(respError); ok {
		return nil, refused
	}
	return slotsOf(reply)
}

func slotsOf(reply any) (*slotTable, error) {
	table := new(slotTable)
	ranges, _ := reply.([]any)
	for _, each := range ranges {
		row, _ := each.([]any)
		if len(row) < 3 {
			return nil, fmt.Errorf("expected first slot, last slot and nodes, got %v", each)
		}
		first, isFirst := row[0].(int64)
		last, isLast := row[1].(int64)
		leader, _ := row[2].([]any)
		if !isFirst || !isLast || first < 0 || last >= slotCount || len(leader) < 2 {
			return nil, fmt.Errorf("expected first slot, last slot and nodes, got %v", each)
		}
		host, isHost := leader[0].([]byte)
		port, isPort := leader[1].(int64)
		if !isHost || !isPort {
			return nil, fmt.Errorf("expected the host and port of a leader, got %v", leader)
		}
		for slot := first; slot <= last; slot++ {
			table[slot] = net.JoinHostPort(string(host), strconv.FormatInt(port, 10))
		}
	}
	for slot, leader := range table {
		if leader == "" {
			return nil, fmt.Errorf("expected a leader of each slot, slot %d has none", slot)
		}
	}
	return table, nil
}

// A clusterClient is one caller with a connection to each leader. It sends each key to the leader of its slot.
type clusterClient struct {
	slots   *slotTable
	leaders map[string]*respClient
}

func dialCluster(slots *slotTable, isGet bool, value []byte) (*clusterClient, error) {
	c := &clusterClient{slots, map[string]*respClient{}}
	for _, leader := range slots {
		if c.leaders[leader] == nil {
			connection, err := dialResp(leader, isGet, value)
			if err != nil {
				c.close()
				return nil, err
			}
			c.leaders[leader] = connection
		}
	}
	return c, nil
}

func (c *clusterClient) do(keys [][]byte) (refused []error, lost error) {
	return c.leaders[c.slots[slotOf(keys[0])]].do(keys)
}

func (c *clusterClient) close() {
	for _, each := range c.leaders {
		each.close()
	}
}

// slotOf returns the Redis Cluster slot of a key: the CRC-16/XMODEM of its hash tag.
func slotOf(key []byte) int {
	if _, after, found := bytes.Cut(key, []byte("{")); found {
		if tag, _, closed := bytes.Cut(after, []byte("}")); closed && len(tag) > 0 {
			key = tag
		}
	}
	crc := uint16(0)
	for _, each := range key {
		crc ^= uint16(each) << 8
		for range 8 {
			if crc&0x8000 != 0 {
				crc = crc<<1 ^ 0x1021
			} else {
				crc <<= 1
			}
		}
	}
	return int(crc % slotCount)
}
