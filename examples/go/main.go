// Quickstart: put, get, compare-and-set and watch over gRPC, with the three outcomes told apart. session.go has many
// operations in flight over one stream.
//
//	./generate.sh && go run . 127.0.0.1:7401
package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log"
	"os"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	kv "github.com/kvstore-log/kvstore-go/kvstorev1"
)

// reasonOf returns the error's name in the store ("CONDITION_FAILED", …) and its fields; an error without them is gRPC's own.
func reasonOf(err error) (string, map[string]string) {
	for _, detail := range status.Convert(err).Details() {
		if info, ok := detail.(*errdetails.ErrorInfo); ok && info.GetDomain() == "kvstore" {
			return info.GetReason(), info.GetMetadata()
		}
	}
	return "", nil
}

// mayBeTriedAgain tells whether the store said that nothing was done, and that the same call may succeed later.
func mayBeTriedAgain(err error) bool {
	reason, _ := reasonOf(err)
	code := status.Code(err)
	if reason == "QUOTA_EXCEEDED" { // until keys are deleted, or the quota is raised
		return false
	}
	return reason != "" && (code == codes.Unavailable || code == codes.ResourceExhausted)
}

// writer numbers the mutations of one client at one partition, so that a retry is done once.
type writer struct {
	client   []byte
	sequence uint64
	seenMs   uint64
}

func newWriter(ctx context.Context, store kv.KVClient) (*writer, error) {
	topology, err := store.Topology(ctx, &kv.TopologyRequest{})
	if err != nil {
		return nil, err
	}
	made := &writer{client: make([]byte, 16)}
	if _, err := rand.Read(made.client); err != nil {
		return nil, err
	}
	for _, partition := range topology.GetPartitions() {
		if seen := partition.GetProgress().GetTimeMs(); made.seenMs == 0 || seen < made.seenMs {
			made.seenMs = seen
		}
	}
	return made, nil
}

// put stores a value, and tries again under the same request id until the deadline of ctx. Once an attempt may have been
// done, the refusal of a later one does not mean that nothing was done.
func (w *writer) put(ctx context.Context, store kv.KVClient, request *kv.PutRequest) (*kv.PutResponse, error) {
	w.sequence++
	request.Request = &kv.RequestId{
		Client: w.client, Sequence: w.sequence, FirstUnacknowledged: w.sequence, SeenMs: w.seenMs,
	}
	for isUnknown := false; ; {
		attempt, cancel := context.WithTimeout(ctx, 2*time.Second)
		answer, err := store.Put(attempt, request)
		cancel()
		if err == nil {
			w.seenMs = max(w.seenMs, answer.GetProgress().GetTimeMs())
			return answer, nil
		}
		if reason, _ := reasonOf(err); reason == "OUTCOME_UNKNOWN" || reason == "" {
			isUnknown = true
		} else if !mayBeTriedAgain(err) {
			if isUnknown {
				return nil, fmt.Errorf("an earlier attempt may have been done: %v", err)
			}
			return nil, err // refused: definitely not done
		}
		select {
		case <-ctx.Done():
			return nil, errors.Join(err, ctx.Err()) // it may have been done
		case <-time.After(100 * time.Millisecond):
		}
	}
}

func run(address string) error {
	connection, err := grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer connection.Close()
	store := kv.NewKVClient(connection)
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()

	// From the first message of the watch on nothing is missed.
	key := []byte("quickstart/go")
	watch, err := store.Watch(ctx, &kv.WatchRequest{Start: key, End: append(key[:len(key):len(key)], 0)})
	if err != nil {
		return err
	}
	if _, err := watch.Recv(); err != nil {
		return err
	}

	writer, err := newWriter(ctx, store)
	if err != nil {
		return err
	}
	put, err := writer.put(ctx, store, &kv.PutRequest{Key: key, Value: []byte("hello")})
	if err != nil {
		return err
	}
	got, err := store.Get(ctx, &kv.GetRequest{Key: key})
	if err != nil {
		return err
	}
	fmt.Printf("got %q, version %d\n", got.GetRecord().GetValue(), got.GetRecord().GetVersion())

	// Compare-and-set: once with the version that is there, once with one that is not any more.
	set := &kv.PutRequest{Key: key, Value: []byte("world"), Flags: uint32(kv.Flag_IF_VERSION), Version: put.GetVersion()}
	if _, err := writer.put(ctx, store, set); err != nil {
		return err
	}
	_, err = writer.put(ctx, store, set)
	reason, fields := reasonOf(err)
	if reason != "CONDITION_FAILED" {
		return fmt.Errorf("expected CONDITION_FAILED, got %w", err)
	}
	fmt.Printf("refused: %s, the version is %s\n", reason, fields["version"])

	for shown := 0; shown < 2; {
		message, err := watch.Recv()
		if err != nil {
			return err
		}
		for _, change := range message.GetChanges() {
			shown++
			fmt.Printf("changed to %q, version %d\n", change.GetRecord().GetValue(), change.GetSequence())
		}
	}
	return compare(ctx, store)
}

// compare writes the same keys twice: each in a call of its own, and all over one session.
func compare(ctx context.Context, store kv.KVClient) error {
	opened, err := openSession(ctx, store)
	if err != nil {
		return err
	}
	inCalls, err := timed(func(key []byte) error {
		_, err := store.Put(ctx, &kv.PutRequest{Key: key, Value: []byte("hello")})
		return err
	})
	if err != nil {
		return err
	}
	overSession, err := timed(func(key []byte) error {
		if _, err := opened.put(key, []byte("world")); err != nil {
			return err
		}
		value, err := opened.get(key)
		if err == nil && string(value) != "world" {
			err = fmt.Errorf("expected the value that was put, got %q", value)
		}
		return err
	})
	if err != nil {
		return err
	}
	fmt.Printf("%d puts took %v in calls; with as many gets, %v over one session\n", callers*each, inCalls, overSession)
	return nil
}

const callers, each = 500, 10

// timed returns how long 500 goroutines take for ten keys each.
func timed(work func(key []byte) error) (time.Duration, error) {
	begun := time.Now()
	done := make(chan error, callers)
	for caller := range callers {
		go func() {
			var err error
			for number := 0; number < each && err == nil; number++ {
				err = work(fmt.Appendf(nil, "quickstart/go/%d/%d", caller, number))
			}
			done <- err
		}()
	}
	var failed error
	for range callers {
		failed = errors.Join(failed, <-done)
	}
	return time.Since(begun).Round(time.Millisecond), failed
}

func main() {
	address := "127.0.0.1:7401"
	if len(os.Args) > 1 {
		address = os.Args[1]
	}
	if err := run(address); err != nil {
		log.Fatal(err)
	}
}
