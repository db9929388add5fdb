// Command closedloop loads one server with a fixed number of callers, each with one request in flight.
//
// It is the load generator of loadtest/bench/suite.py. One program measures every store, so that the cost of the client
// is the same for each protocol. It prints three lines: `begin` and `end` at the borders of the measured span, so that
// the caller can read the servers' processor time there, and then the figures as JSON. Requests that complete within
// the span are counted.
package main

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

const (
	timeout     = 10 * time.Second // of one request, and of a connection attempt
	redialPause = 100 * time.Millisecond
	errorsMax   = 20 // kinds of errors in the report; further kinds count as "other"
	errorLength = 80 // bytes of an error's text in the report
)

// A client makes the requests of one caller.
type client interface {
	// do carries out one operation on each key and returns the errors of single operations. The second result is the
	// error that makes the client unusable.
	do(keys [][]byte) (refused []error, lost error)
	close()
}

// options are the parameters of a run.
type options struct {
	protocol, op, prefix                        string
	addresses                                   []string
	connections, pipeline, channels, valueBytes int
	keys                                        uint64
	seconds, warmup                             time.Duration
	seed                                        uint64
}

// figures are the results of a run. Times are in milliseconds.
type figures struct {
	Operations int            `json:"operations"`
	Seconds    float64        `json:"seconds"`
	Rate       float64        `json:"rate"`
	P50        float64        `json:"p50_ms"`
	P99        float64        `json:"p99_ms"`
	Errors     map[string]int `json:"errors"`
}

// A tally holds what one caller has measured.
type tally struct {
	took   []time.Duration // of each request
	errors map[string]int
}

func (t *tally) fail(err error) {
	text := err.Error()
	text = text[:min(len(text), errorLength)]
	if _, known := t.errors[text]; !known && len(t.errors) >= errorsMax {
		text = "other"
	}
	t.errors[text]++
}

func parse(words []string) (options, error) {
	var o options
	var addresses string
	set := flag.NewFlagSet("closedloop", flag.ContinueOnError)
	set.StringVar(&o.protocol, "protocol", "resp", "resp, cluster (RESP, each key to its leader), kv or etcd (gRPC), http or gateway (etcd's JSON)")
	set.StringVar(&addresses, "addresses", "", "servers, host:port,...; callers take them in turn")
	set.StringVar(&o.op, "op", "set", "set, get, or fill, which sets each key once")
	set.StringVar(&o.prefix, "prefix", "key:", "prefix of all keys; twelve digits follow")
	set.IntVar(&o.connections, "connections", 50, "number of callers")
	set.IntVar(&o.pipeline, "pipeline", 1, "operations in a request, for resp")
	set.IntVar(&o.channels, "channels", 0, "gRPC connections that the callers share; 0: one for each caller")
	set.IntVar(&o.valueBytes, "value-bytes", 100, "size of a value")
	set.Uint64Var(&o.keys, "keys", 1_000_000, "number of keys")
	set.DurationVar(&o.seconds, "measure", 2*time.Second, "measured span")
	set.DurationVar(&o.warmup, "warmup", 500*time.Millisecond, "time before the span")
	set.Uint64Var(&o.seed, "seed", 1, "seed of the keys")
	if err := set.Parse(words); err != nil {
		return o, err
	}
	o.addresses = strings.Split(addresses, ",")
	switch {
	case addresses == "" || set.NArg() > 0:
		return o, errors.New("expected -addresses host:port,... and no further words")
	case o.op != "set" && o.op != "get" && o.op != "fill":
		return o, fmt.Errorf("expected the operation set, get or fill, got %q", o.op)
	case o.connections < 1 || o.pipeline < 1 || o.channels < 0 || o.valueBytes < 1 || o.keys < 1:
		return o, errors.New("expected at least 1 connection, pipelined operation, key and byte of a value")
	case o.pipeline > 1 && o.protocol != "resp":
		return o, fmt.Errorf("expected -pipeline 1 with -protocol %s, got %d", o.protocol, o.pipeline)
	case o.seconds <= 0 || o.warmup < 0:
		return o, errors.New("expected a measured span of more than 0 s")
	}
	return o, nil
}

// dialer returns the function that connects caller number n.
func (o options) dialer() (func(n int) (client, error), error) {
	value := make([]byte, o.valueBytes)
	random := rand.New(rand.NewPCG(o.seed, 0))
	for i := range value {
		value[i] = byte(random.Uint32())
	}
	isGet := o.op == "get"
	switch o.protocol {
	case "resp":
		return func(n int) (client, error) { return dialResp(o.addresses[n%len(o.addresses)], isGet, value) }, nil
	case "cluster":
		slots, err := readSlots(o.addresses[0])
		if err != nil {
			return nil, err
		}
		return func(int) (client, error) { return dialCluster(slots, isGet, value) }, nil
	case "kv", "etcd":
		channels, err := dialChannels(o)
		if err != nil {
			return nil, err
		}
		return func(n int) (client, error) { return channels.caller(n, o.protocol, isGet, value), nil }, nil
	case "http", "gateway":
		return func(n int) (client, error) {
			return dialHTTP(o.addresses[n%len(o.addresses)], o.protocol == "gateway", isGet, value)
		}, nil
	}
	return nil, fmt.Errorf("expected a protocol of resp, cluster, kv, etcd, http and gateway, got %q", o.protocol)
}

// A loop is the state that all callers share.
type loop struct {
	options
	dial    func(n int) (client, error)
	filled  atomic.Uint64 // keys that fill has given out
	counted atomic.Bool   // requests that complete now are in the figures
	ended   atomic.Bool
}

// next draws the key of the next operation. It returns false at the end of fill.
func (l *loop) next(random *rand.Rand) ([]byte, bool) {
	var number uint64
	if l.op == "fill" {
		if number = l.filled.Add(1) - 1; number >= l.keys {
			return nil, false
		}
	} else {
		number = random.Uint64N(l.keys)
	}
	return fmt.Appendf(nil, "%s%012d", l.prefix, number), true
}

// call makes requests until the load ends. It connects again after a lost connection.
func (l *loop) call(n int, c client) tally {
	found := tally{errors: map[string]int{}}
	random := rand.New(rand.NewPCG(l.seed, uint64(n)+1))
	keys := make([][]byte, 0, l.pipeline)
	defer func() {
		if c != nil {
			c.close()
		}
	}()
	for !l.ended.Load() {
		if c == nil {
			var err error
			if c, err = l.dial(n); err != nil {
				found.fail(err)
				time.Sleep(redialPause)
				continue
			}
		}
		keys = keys[:0]
		for len(keys) < l.pipeline {
			key, ok := l.next(random)
			if !ok {
				break
			}
			keys = append(keys, key)
		}
		if len(keys) == 0 {
			break
		}
		began := time.Now()
		refused, lost := c.do(keys)
		took := time.Since(began)
		if lost != nil {
			c.close()
			c = nil
			refused = append(refused, lost)
		}
		if !l.counted.Load() {
			continue
		}
		for _, err := range refused {
			found.fail(err)
		}
		if lost == nil {
			for range len(keys) - len(refused) {
				found.took = append(found.took, took)
			}
		}
	}
	return found
}

func (l *loop) run() (figures, error) {
	clients := make([]client, l.connections)
	for n := range clients {
		var err error
		if clients[n], err = l.dial(n); err != nil {
			return figures{}, err
		}
	}
	isFill := l.op == "fill"
	l.counted.Store(isFill)
	tallies := make([]tally, l.connections)
	var callers sync.WaitGroup
	for n, c := range clients {
		callers.Go(func() { tallies[n] = l.call(n, c) })
	}
	if !isFill {
		time.Sleep(l.warmup)
	}
	fmt.Println("begin")
	l.counted.Store(true)
	began := time.Now()
	if isFill {
		callers.Wait()
	} else {
		time.Sleep(l.seconds)
	}
	l.counted.Store(false)
	took := time.Since(began)
	fmt.Println("end")
	l.ended.Store(true)
	callers.Wait()
	return sum(tallies, took), nil
}

func sum(tallies []tally, span time.Duration) figures {
	found := figures{Seconds: span.Seconds(), Errors: map[string]int{}}
	var all []time.Duration
	for _, each := range tallies {
		all = append(all, each.took...)
		for text, count := range each.errors {
			found.Errors[text] += count
		}
	}
	slices.Sort(all)
	found.Operations = len(all)
	found.Rate = float64(len(all)) / span.Seconds()
	if len(all) > 0 {
		found.P50 = float64(all[len(all)*50/100].Microseconds()) / 1000
		found.P99 = float64(all[len(all)*99/100].Microseconds()) / 1000
	}
	return found
}

func main() {
	debug.SetGCPercent(400) // the collector would take processor time from the servers
	err := run(os.Args[1:])
	if err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "closedloop:", err)
		os.Exit(2)
	}
}

func run(words []string) error {
	o, err := parse(words)
	if err != nil {
		return err
	}
	dial, err := o.dialer()
	if err != nil {
		return err
	}
	l := &loop{options: o, dial: dial}
	found, err := l.run()
	if err != nil {
		return err
	}
	return json.NewEncoder(os.Stdout).Encode(found)
}
