package io.github.kvstorelog.quickstart;

import com.google.protobuf.ByteString;
import io.github.kvstorelog.v1.Answers;
import io.github.kvstorelog.v1.Code;
import io.github.kvstorelog.v1.Failure;
import io.github.kvstorelog.v1.Frame;
import io.github.kvstorelog.v1.KVGrpc;
import io.github.kvstorelog.v1.Lane;
import io.grpc.stub.StreamObserver;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.Semaphore;

/**
 * Has many operations in flight over one stream. Any number of threads share it. Operations that are submitted while one
 * message is being built travel in the next message, so that the server pays for messages, not for operations.
 */
final class Session implements AutoCloseable {
    private static final int FRAME_MAX = 1000; // operations in one message
    private static final int WAITING_MAX = 4096; // operations that have no answer yet

    /** The stream broke before the answer came: a write was perhaps carried out. */
    static final class OutcomeUnknown extends RuntimeException {
        OutcomeUnknown(Throwable cause) {
            super("outcome unknown: the session has ended", cause);
        }
    }

    /** The server answered an operation with an error. */
    static final class Failed extends RuntimeException {
        final String reason;

        Failed(Failure failure) {
            super(failure.getReason() + ": " + failure.getMessage());
            this.reason = failure.getReason();
        }
    }

    private record Answer(long version, Optional<ByteString> value) {}

    private record Operation(Code code, ByteString key, ByteString value, CompletableFuture<Answer> answer) {}

    private final Semaphore free = new Semaphore(WAITING_MAX);
    private final BlockingQueue<Operation> queue = new LinkedBlockingQueue<>();
    private final Map<Long, Operation> waiting = new ConcurrentHashMap<>(); // by the operation's number
    private final Thread sender = new Thread(this::send, "session");
    private final StreamObserver<Frame> stream;
    private volatile OutcomeUnknown end; // null while the stream is open

    Session(KVGrpc.KVStub store) {
        stream = store.session(new Receiver());
        sender.setDaemon(true);
        sender.start();
    }

    /** Stores a value and returns its version. Give each put a RequestId in its lane if you want to retry it. */
    CompletableFuture<Long> put(ByteString key, ByteString value) throws InterruptedException {
        return ask(Code.PUT, key, value).thenApply(Answer::version);
    }

    /** Returns the value of a key, and nothing if there is no record. */
    CompletableFuture<Optional<ByteString>> get(ByteString key) throws InterruptedException {
        return ask(Code.GET, key, ByteString.EMPTY).thenApply(Answer::value);
    }

    /** Ends the stream. The outcome of operations without an answer is unknown. */
    @Override
    public void close() {
        sender.interrupt();
    }

    private CompletableFuture<Answer> ask(Code code, ByteString key, ByteString value) throws InterruptedException {
        free.acquire();
        CompletableFuture<Answer> answer = new CompletableFuture<>();
        answer.whenComplete((found, failure) -> free.release());
        queue.add(new Operation(code, key, value, answer));
        failIfEnded();
        return answer;
    }

    private void send() {
        try {
            for (long next = 1; ; ) {
                List<Operation> asked = new ArrayList<>(List.of(queue.take()));
                queue.drainTo(asked, FRAME_MAX - 1);
                // Without a partition the server finds the owner of each key.
                Lane.Builder lane = Lane.newBuilder().setFirst(next);
                for (Operation each : asked) {
                    lane.addCodes(each.code()).addKeys(each.key()).addValues(each.value());
                    waiting.put(next++, each);
                }
                failIfEnded();
                stream.onNext(Frame.newBuilder().addLanes(lane).build());
            }
        } catch (InterruptedException closed) {
            stream.onCompleted();
        }
    }

    private void failIfEnded() {
        if (end == null) {
            return;
        }
        for (Operation each; (each = queue.poll()) != null; ) {
            each.answer().completeExceptionally(end);
        }
        for (Operation each : waiting.values()) {
            each.answer().completeExceptionally(end);
        }
    }

    private final class Receiver implements StreamObserver<Answers> {
        @Override
        public void onNext(Answers answers) {
            for (int i = 0; i < answers.getNumbersCount(); i++) {
                resolve(answers.getNumbers(i), new Answer(answers.getVersions(i), Optional.empty()));
            }
            for (int i = 0; i < answers.getFoundCount(); i++) {
                resolve(answers.getFound(i), new Answer(answers.getFoundVersions(i), Optional.of(answers.getValues(i))));
            }
            for (long number : answers.getAbsentList()) {
                resolve(number, new Answer(0, Optional.empty()));
            }
            for (Failure failure : answers.getFailuresList()) {
                for (long number : failure.getNumbersList()) {
                    waiting.remove(number).answer().completeExceptionally(new Failed(failure));
                }
            }
        }

        private void resolve(long number, Answer found) {
            waiting.remove(number).answer().complete(found);
        }

        @Override
        public void onError(Throwable failure) {
            end = new OutcomeUnknown(failure);
            failIfEnded();
            sender.interrupt();
        }

        @Override
        public void onCompleted() {
            onError(null);
        }
    }
}
