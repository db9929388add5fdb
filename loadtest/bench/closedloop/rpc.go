package main

import (
	"context"
	"encoding/binary"
	"fmt"

	"google.golang.org/grpc"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
)

// methods has the unary calls of each protocol. Both stores number the fields of their requests alike: 1 is the key,
// and 2 is the value.
var methods = map[string]struct{ get, put string }{
	"kv":   {"/kvstore.v1.KV/Get", "/kvstore.v1.KV/Put"},
	"etcd": {"/etcdserverpb.KV/Range", "/etcdserverpb.KV/Put"},
}

// A raw codec passes encoded messages on, so that no generated code is needed.
type raw struct{}

func (raw) Marshal(v any) ([]byte, error) { return *v.(*[]byte), nil }

func (raw) Unmarshal(data []byte, v any) error {
	*v.(*[]byte) = data
	return nil
}

func (raw) Name() string { return "proto" }

// channels are the connections that all callers share.
type channels []*grpc.ClientConn

func dialChannels(o options) (channels, error) {
	count := o.channels
	if count == 0 {
		count = o.connections
	}
	made := make(channels, count)
	for n := range made {
		var err error
		made[n], err = grpc.NewClient(
			"passthrough:///"+o.addresses[n%len(o.addresses)],
			grpc.WithTransportCredentials(insecure.NewCredentials()),
			grpc.WithDefaultCallOptions(grpc.ForceCodec(raw{})),
		)
		if err != nil {
			return nil, err
		}
	}
	return made, made.connect()
}

// connect waits until all channels are connected, so that handshakes are not part of the load.
func (c channels) connect() error {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	for _, channel := range c {
		channel.Connect()
	}
	for _, channel := range c {
		for state := channel.GetState(); state != connectivity.Ready; state = channel.GetState() {
			if !channel.WaitForStateChange(ctx, state) {
				return fmt.Errorf("%s: not connected within %v", channel.Target(), timeout)
			}
		}
	}
	return nil
}

func (c channels) caller(n int, protocol string, isGet bool, value []byte) client {
	method := methods[protocol].put
	if isGet {
		method = methods[protocol].get
	}
	return &rpcClient{c[n%len(c)], method, isGet, value}
}

// An rpcClient makes unary calls, one at a time.
type rpcClient struct {
	channel *grpc.ClientConn
	method  string
	isGet   bool
	value   []byte
}

func (c *rpcClient) do(keys [][]byte) (refused []error, lost error) {
	request := appendField(nil, 1, keys[0])
	if !c.isGet {
		request = appendField(request, 2, c.value)
	}
	var reply []byte
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	if err := c.channel.Invoke(ctx, c.method, &request, &reply); err != nil {
		return []error{status.Convert(err).Err()}, nil
	}
	if c.isGet && len(reply) < len(c.value) {
		return []error{errAbsent}, nil
	}
	return nil, nil
}

func (c *rpcClient) close() {} // the channels are shared

// appendField encodes a field of bytes of a protobuf message.
func appendField(to []byte, number byte, value []byte) []byte {
	to = binary.AppendUvarint(append(to, number<<3|2), uint64(len(value)))
	return append(to, value...)
}
