package main

import (
	"context"
	"errors"
	"fmt"
	"sync"

	kv "github.com/kvstore-log/kvstore-go/kvstorev1"
)

const (
	frameMax   = 1000 // operations in one message
	waitingMax = 4096 // operations that have no answer yet
)

// errUnknown means that the stream broke before the answer came: a write was perhaps done.
var errUnknown = errors.New("outcome unknown: the session has ended")

// session has many operations in flight over one stream. Any number of goroutines share it. What they submit while one
// message is being sent travels in the next message, so that the server pays for messages, not for operations.
type session struct {
	stream kv.KV_SessionClient
	ctx    context.Context // done once the stream has ended
	free   chan struct{}   // one element for each operation that has no answer yet
	queue  chan operation

	mu      sync.Mutex
	waiting map[uint64]chan<- answer // by the operation's number
}

type operation struct {
	code       kv.Code
	key, value []byte
	done       chan<- answer
}

type answer struct {
	version uint64
	value   []byte // nil if there is no record
	err     error
}

// openSession opens a stream that lasts until ctx is done.
func openSession(ctx context.Context, store kv.KVClient) (*session, error) {
	ctx, cancel := context.WithCancel(ctx)
	stream, err := store.Session(ctx)
	if err != nil {
		cancel()
		return nil, err
	}
	opened := &session{
		stream:  stream,
		ctx:     ctx,
		free:    make(chan struct{}, waitingMax),
		queue:   make(chan operation, waitingMax),
		waiting: map[uint64]chan<- answer{},
	}
	go opened.send()
	go func() {
		defer cancel()
		opened.receive()
	}()
	return opened, nil
}

// put stores a value and returns its version. Give each put a RequestId in its lane if you want to retry it.
func (s *session) put(key, value []byte) (uint64, error) {
	found := s.ask(operation{code: kv.Code_PUT, key: key, value: value})
	return found.version, found.err
}

// get returns the value of a key, and nil if there is none.
func (s *session) get(key []byte) ([]byte, error) {
	found := s.ask(operation{code: kv.Code_GET, key: key})
	return found.value, found.err
}

func (s *session) ask(asked operation) answer {
	done := make(chan answer, 1)
	asked.done = done
	select {
	case s.free <- struct{}{}:
	case <-s.ctx.Done():
		return answer{err: errUnknown}
	}
	defer func() { <-s.free }()
	s.queue <- asked
	select {
	case found := <-done:
		return found
	case <-s.ctx.Done():
		return answer{err: errUnknown}
	}
}

func (s *session) send() {
	next := uint64(1)
	for {
		var asked []operation
		select {
		case first := <-s.queue:
			asked = append(asked, first)
		case <-s.ctx.Done():
			return
		}
		for more := true; more && len(asked) < frameMax; {
			select {
			case another := <-s.queue:
				asked = append(asked, another)
			default:
				more = false
			}
		}
		// Without a partition the server finds the owner of each key.
		lane := &kv.Lane{First: next}
		s.mu.Lock()
		for _, each := range asked {
			lane.Codes = append(lane.Codes, each.code)
			lane.Keys = append(lane.Keys, each.key)
			lane.Values = append(lane.Values, each.value)
			s.waiting[next] = each.done
			next++
		}
		s.mu.Unlock()
		if err := s.stream.Send(&kv.Frame{Lanes: []*kv.Lane{lane}}); err != nil {
			return // receive learns why
		}
	}
}

func (s *session) receive() {
	for {
		answers, err := s.stream.Recv()
		if err != nil {
			return
		}
		for i, number := range answers.GetNumbers() {
			s.resolve(number, answer{version: answers.GetVersions()[i]})
		}
		for i, number := range answers.GetFound() {
			s.resolve(number, answer{value: answers.GetValues()[i], version: answers.GetFoundVersions()[i]})
		}
		for _, number := range answers.GetAbsent() {
			s.resolve(number, answer{})
		}
		for _, failure := range answers.GetFailures() {
			for _, number := range failure.GetNumbers() {
				s.resolve(number, answer{err: fmt.Errorf("%s: %s", failure.GetReason(), failure.GetMessage())})
			}
		}
	}
}

func (s *session) resolve(number uint64, found answer) {
	s.mu.Lock()
	done := s.waiting[number]
	delete(s.waiting, number)
	s.mu.Unlock()
	if done != nil {
		done <- found
	}
}
