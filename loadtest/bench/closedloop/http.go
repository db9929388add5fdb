package main

import (
	"bufio"
	"encoding/base64"
	"fmt"
	"io"
	"net"
	"net/http"
	"time"
)

// An httpClient is one connection that stays open. It writes requests itself, because the transport of net/http costs
// two goroutines for each connection.
type httpClient struct {
	connection       net.Conn
	reader           *bufio.Reader
	address          string
	isGateway, isGet bool
	value            []byte
	encoded          string // the value in base64, for the gateway
}

func dialHTTP(address string, isGateway, isGet bool, value []byte) (*httpClient, error) {
	connection, err := net.DialTimeout("tcp", address, timeout)
	if err != nil {
		return nil, err
	}
	encoded := base64.StdEncoding.EncodeToString(value)
	return &httpClient{connection, bufio.NewReader(connection), address, isGateway, isGet, value, encoded}, nil
}

func (c *httpClient) close() { c.connection.Close() }

func (c *httpClient) request(key []byte) []byte {
	if !c.isGateway {
		if c.isGet {
			return fmt.Appendf(nil, "GET /v1/keys/%s HTTP/1.1\r\nHost: %s\r\n\r\n", key, c.address)
		}
		head := fmt.Appendf(nil, "PUT /v1/keys/%s HTTP/1.1\r\nHost: %s\r\nContent-Length: %d\r\n\r\n", key, c.address, len(c.value))
		return append(head, c.value...)
	}
	call, body := "range", fmt.Sprintf(`{"key":"%s"}`, base64.StdEncoding.EncodeToString(key))
	if !c.isGet {
		call, body = "put", fmt.Sprintf(`{"key":"%s","value":"%s"}`, base64.StdEncoding.EncodeToString(key), c.encoded)
	}
	return fmt.Appendf(nil, "POST /v3/kv/%s HTTP/1.1\r\nHost: %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", call, c.address, len(body), body)
}

func (c *httpClient) do(keys [][]byte) (refused []error, lost error) {
	if err := c.connection.SetDeadline(time.Now().Add(timeout)); err != nil {
		return nil, err
	}
	if _, err := c.connection.Write(c.request(keys[0])); err != nil {
		return nil, err
	}
	response, err := http.ReadResponse(c.reader, nil)
	if err != nil {
		return nil, err
	}
	length, err := io.Copy(io.Discard, response.Body)
	response.Body.Close()
	if err != nil {
		return nil, err
	}
	if response.StatusCode >= 300 {
		refused = append(refused, fmt.Errorf("HTTP %s", response.Status))
	} else if c.isGet && length < int64(len(c.value)) {
		refused = append(refused, errAbsent)
	}
	if response.Close {
		return refused, fmt.Errorf("closed after HTTP %s", response.Status)
	}
	return refused, nil
}
