package main

import (
	"bufio"
	"errors"
	"fmt"
	"net"
	"reflect"
	"strings"
	"testing"
	"time"
)

func TestSlotIsTheCRCOfTheTag(t *testing.T) {
	for key, wanted := range map[string]int{
		"123456789": 12739, "{123456789}:1": 12739, "{}1": 12430, "foo{bar": 15278, "{a}{b}": 15495,
	} {
		if found := slotOf([]byte(key)); found != wanted {
			t.Errorf("%s: expected slot %d, got %d", key, wanted, found)
		}
	}
}

func row(first, last int64, host string, port int64) []any {
	return []any{first, last, []any{[]byte(host), port}}
}

func TestTableHasTheLeaderOfEachSlot(t *testing.T) {
	table, err := slotsOf([]any{row(0, 99, "a", 1), row(100, slotCount-1, "b", 2)})
	if err != nil {
		t.Fatal(err)
	}
	if table[99] != "a:1" || table[100] != "b:2" || table[slotCount-1] != "b:2" {
		t.Errorf("unexpected leaders %s, %s, %s", table[99], table[100], table[slotCount-1])
	}
	for _, bad := range []any{nil, []any{row(0, 99, "a", 1)}, []any{row(0, slotCount, "a", 1)}, []any{[]any{int64(0)}}} {
		if _, err := slotsOf(bad); err == nil {
			t.Errorf("expected an error of %v", bad)
		}
	}
}

func TestRepliesAreParsed(t *testing.T) {
	text := "+OK\r\n$3\r\nabc\r\n$-1\r\n:7\r\n-ERR no\r\n*2\r\n:1\r\n$0\r\n\r\n"
	reader := bufio.NewReader(strings.NewReader(text))
	for _, wanted := range []any{[]byte("OK"), []byte("abc"), []byte(nil), int64(7), respError("ERR no"), []any{int64(1), []byte{}}} {
		if found, err := readReply(reader); err != nil || !reflect.DeepEqual(found, wanted) {
			t.Errorf("expected %#v, got %#v, %v", wanted, found, err)
		}
	}
	for _, bad := range []string{"\r\n", "?\r\n", "$x\r\n", "$99999999999\r\n", "$5\r\nab"} {
		if found, err := readReply(bufio.NewReader(strings.NewReader(bad))); err == nil {
			t.Errorf("%q: expected an error, got %#v", bad, found)
		}
	}
}

func TestFiguresAreOfAllCallers(t *testing.T) {
	var slow, fast tally
	slow.errors, fast.errors = map[string]int{"refused": 2}, map[string]int{"refused": 1, "lost": 1}
	for n := range 98 {
		fast.took = append(fast.took, time.Duration(n+1)*time.Millisecond)
	}
	slow.took = []time.Duration{time.Second, 2 * time.Second}
	found := sum([]tally{slow, fast}, 2*time.Second)
	wanted := figures{100, 2, 50, 51, 2000, map[string]int{"refused": 3, "lost": 1}}
	if !reflect.DeepEqual(found, wanted) {
		t.Errorf("expected %+v, got %+v", wanted, found)
	}
}

func TestKindsOfErrorsAreBounded(t *testing.T) {
	found := tally{errors: map[string]int{}}
	for n := range 10 * errorsMax {
		found.fail(fmt.Errorf("%d%s", n, strings.Repeat("x", 1000)))
	}
	if len(found.errors) != errorsMax+1 || found.errors["other"] != 9*errorsMax {
		t.Errorf("got %d kinds, %d other errors", len(found.errors), found.errors["other"])
	}
}

// A refusing server answers every other command with an error, and closes each connection after four.
func refusing(t *testing.T) string {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { listener.Close() })
	go func() {
		for {
			connection, err := listener.Accept()
			if err != nil {
				return
			}
			reader := bufio.NewReader(connection)
			for n := range 4 {
				if _, err := readReply(reader); err != nil {
					break
				}
				connection.Write([]byte([]string{"+OK\r\n", "-ERR refused\r\n"}[n%2]))
			}
			connection.Close()
		}
	}()
	return listener.Addr().String()
}

func TestRefusedAndLostRequestsAreErrors(t *testing.T) {
	o, err := parse([]string{"-addresses", refusing(t), "-op", "fill", "-keys", "20", "-connections", "1"})
	if err != nil {
		t.Fatal(err)
	}
	dial, err := o.dialer()
	if err != nil {
		t.Fatal(err)
	}
	found, err := (&loop{options: o, dial: dial}).run()
	if err != nil {
		t.Fatal(err)
	}
	// Each connection answers four requests, and the fifth is lost.
	if found.Operations != 8 || found.Errors["ERR refused"] != 8 || len(found.Errors) < 2 {
		t.Errorf("got %+v", found)
	}
}

func TestBadOptionsAreRefused(t *testing.T) {
	for _, words := range []string{
		"", "-addresses a:1 more", "-addresses a:1 -op other", "-addresses a:1 -connections 0", "-addresses a:1 -measure 0s",
		"-addresses a:1 -protocol http -pipeline 2",
	} {
		if _, err := parse(strings.Fields(words)); err == nil || errors.Is(err, errAbsent) {
			t.Errorf("%q: expected an error, got %v", words, err)
		}
	}
	o, _ := parse([]string{"-addresses", "a:1", "-protocol", "other"})
	if _, err := o.dialer(); err == nil {
		t.Error("expected an error of an unknown protocol")
	}
}
