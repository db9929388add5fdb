package io.github.kvstorelog.quickstart;

import com.google.protobuf.Any;
import com.google.protobuf.ByteString;
import com.google.rpc.ErrorInfo;
import io.github.kvstorelog.v1.Change;
import io.github.kvstorelog.v1.Flag;
import io.github.kvstorelog.v1.GetRequest;
import io.github.kvstorelog.v1.KVGrpc;
import io.github.kvstorelog.v1.Partition;
import io.github.kvstorelog.v1.PutRequest;
import io.github.kvstorelog.v1.PutResponse;
import io.github.kvstorelog.v1.Record;
import io.github.kvstorelog.v1.RequestId;
import io.github.kvstorelog.v1.TopologyRequest;
import io.github.kvstorelog.v1.WatchRequest;
import io.github.kvstorelog.v1.WatchResponse;
import io.grpc.Grpc;
import io.grpc.InsecureChannelCredentials;
import io.grpc.ManagedChannel;
import io.grpc.StatusRuntimeException;
import io.grpc.protobuf.StatusProto;
import java.security.SecureRandom;
import java.util.ArrayList;
import java.util.Iterator;
import java.util.List;
import java.util.Optional;
import java.util.concurrent.Callable;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;
import java.util.concurrent.TimeUnit;

/**
 * Quickstart: put, get, compare-and-set and watch over gRPC, with the three outcomes told apart. Session.java has many
 * operations in flight over one stream.
 *
 * <p>{@code mvn -q compile exec:java -Dexec.args=127.0.0.1:7401}
 */
public final class Quickstart {
    private static final long TIMEOUT_S = 30;
    private static final long ATTEMPT_S = 2;
    private static final long PAUSE_MS = 100;
    private static final int CALLERS = 500;
    private static final int KEYS = 10;

    private final KVGrpc.KVBlockingStub store;
    private final ByteString client;
    private long seenMs;
    private long sequence;

    /** Numbers the mutations of one client at one partition, so that a retry is done once. */
    private Quickstart(KVGrpc.KVBlockingStub store) {
        this.store = store;
        byte[] random = new byte[16];
        new SecureRandom().nextBytes(random);
        this.client = ByteString.copyFrom(random);
        this.seenMs = within(TIMEOUT_S).topology(TopologyRequest.getDefaultInstance()).getPartitionsList().stream()
                .map(Partition::getProgress)
                .mapToLong(progress -> progress.getTimeMs())
                .min()
                .orElseThrow();
    }

    private KVGrpc.KVBlockingStub within(long seconds) {
        return store.withDeadlineAfter(seconds, TimeUnit.SECONDS);
    }

    /** The error as the store has it; empty where it is gRPC's own, which says nothing of what was done. */
    private static Optional<ErrorInfo> errorOf(StatusRuntimeException failure) {
        com.google.rpc.Status status = StatusProto.fromThrowable(failure);
        if (status == null) {
            return Optional.empty();
        }
        for (Any detail : status.getDetailsList()) {
            try {
                if (detail.is(ErrorInfo.class)) {
                    ErrorInfo found = detail.unpack(ErrorInfo.class);
                    if (found.getDomain().equals("kvstore")) {
                        return Optional.of(found);
                    }
                }
            } catch (com.google.protobuf.InvalidProtocolBufferException malformed) {
                return Optional.empty();
            }
        }
        return Optional.empty();
    }

    /** Whether the call may have been done. */
    private static boolean isUnknown(StatusRuntimeException failure) {
        return errorOf(failure).map(ErrorInfo::getReason).orElse("OUTCOME_UNKNOWN").equals("OUTCOME_UNKNOWN");
    }

    /** Whether the store said that nothing was done and never will be by this call, so that trying again is in vain. */
    private static boolean isRefused(StatusRuntimeException failure) {
        if (isUnknown(failure)) {
            return false;
        }
        return switch (failure.getStatus().getCode()) {
            case UNAVAILABLE -> false;
            case RESOURCE_EXHAUSTED -> errorOf(failure).orElseThrow().getReason().equals("QUOTA_EXCEEDED");
            default -> true;
        };
    }

    /**
     * Stores a value, and tries again under the same request id. Once an attempt may have been done, the refusal of a
     * later one does not mean that nothing was done.
     */
    private PutResponse put(PutRequest.Builder request) throws InterruptedException {
        sequence++;
        request.setRequest(RequestId.newBuilder()
                .setClient(client)
                .setSequence(sequence)
                .setFirstUnacknowledged(sequence)
                .setSeenMs(seenMs));
        long until = System.nanoTime() + TimeUnit.SECONDS.toNanos(TIMEOUT_S);
        boolean isUnknown = false;
        while (true) {
            try {
                PutResponse answer = within(ATTEMPT_S).put(request.build());
                seenMs = Math.max(seenMs, answer.getProgress().getTimeMs());
                return answer;
            } catch (StatusRuntimeException failure) {
                if (isUnknown && isRefused(failure)) {
                    throw new IllegalStateException("an earlier attempt may have been done", failure);
                }
                isUnknown |= isUnknown(failure);
                if (isRefused(failure) || System.nanoTime() > until) {
                    throw failure;
                }
                Thread.sleep(PAUSE_MS);
            }
        }
    }

    private void run() throws InterruptedException {
        ByteString key = ByteString.copyFromUtf8("quickstart/java");
        ByteString behind = key.concat(ByteString.copyFrom(new byte[] {0}));
        Iterator<WatchResponse> watch =
                within(TIMEOUT_S).watch(WatchRequest.newBuilder().setStart(key).setEnd(behind).build());
        watch.next(); // from the first message on nothing is missed

        PutResponse put = put(PutRequest.newBuilder().setKey(key).setValue(ByteString.copyFromUtf8("hello")));
        Record got = within(TIMEOUT_S).get(GetRequest.newBuilder().setKey(key).build()).getRecord();
        System.out.printf("got \"%s\", version %d%n", got.getValue().toStringUtf8(), got.getVersion());

        // Compare-and-set: once with the version that is there, once with one that is not any more.
        PutRequest.Builder set = PutRequest.newBuilder()
                .setKey(key)
                .setValue(ByteString.copyFromUtf8("world"))
                .setFlags(Flag.IF_VERSION_VALUE)
                .setVersion(put.getVersion());
        put(set);
        try {
            put(set);
            throw new IllegalStateException("expected CONDITION_FAILED, but the write was done");
        } catch (StatusRuntimeException failure) {
            ErrorInfo error = errorOf(failure).orElseThrow(() -> failure);
            System.out.printf(
                    "refused: %s, the version is %s%n", error.getReason(), error.getMetadataMap().get("version"));
        }

        for (int shown = 0; shown < 2; ) {
            for (Change change : watch.next().getChangesList()) {
                shown++;
                String value = change.getRecord().getValue().toStringUtf8();
                System.out.printf("changed to \"%s\", version %d%n", value, change.getSequence());
            }
        }
    }

    /** Writes the same keys twice: each in a call of its own, and all over one session. */
    private static void compare(KVGrpc.KVBlockingStub store, Session session) throws Exception {
        ByteString hello = ByteString.copyFromUtf8("hello");
        ByteString world = ByteString.copyFromUtf8("world");
        long inCalls = timed(key -> store.withDeadlineAfter(TIMEOUT_S, TimeUnit.SECONDS)
                .put(PutRequest.newBuilder().setKey(key).setValue(hello).build()));
        long overSession = timed(key -> {
            session.put(key, world).get(TIMEOUT_S, TimeUnit.SECONDS);
            Optional<ByteString> found = session.get(key).get(TIMEOUT_S, TimeUnit.SECONDS);
            if (!found.equals(Optional.of(world))) {
                throw new IllegalStateException("expected the value that was put, got " + found);
            }
        });
        System.out.printf(
                "%d puts took %d ms in calls; with as many gets, %d ms over one session%n",
                CALLERS * KEYS, inCalls, overSession);
    }

    private interface Work {
        void on(ByteString key) throws Exception;
    }

    /** Returns the milliseconds that 500 threads take for ten keys each. */
    private static long timed(Work work) throws Exception {
        ExecutorService threads = Executors.newFixedThreadPool(CALLERS);
        try {
            List<Callable<Void>> callers = new ArrayList<>();
            for (int caller = 0; caller < CALLERS; caller++) {
                String prefix = "quickstart/java/" + caller + "/";
                callers.add(() -> {
                    for (int number = 0; number < KEYS; number++) {
                        work.on(ByteString.copyFromUtf8(prefix + number));
                    }
                    return null;
                });
            }
            long begun = System.nanoTime();
            for (Future<Void> done : threads.invokeAll(callers)) {
                done.get();
            }
            return TimeUnit.NANOSECONDS.toMillis(System.nanoTime() - begun);
        } finally {
            threads.shutdownNow();
        }
    }

    public static void main(String[] arguments) throws Exception {
        String address = arguments.length > 0 ? arguments[0] : "127.0.0.1:7401";
        ManagedChannel channel = Grpc.newChannelBuilder(address, InsecureChannelCredentials.create()).build();
        try {
            KVGrpc.KVBlockingStub store = KVGrpc.newBlockingStub(channel);
            new Quickstart(store).run();
            try (Session session = new Session(KVGrpc.newStub(channel))) {
                compare(store, session);
            }
        } finally {
            channel.shutdownNow().awaitTermination(TIMEOUT_S, TimeUnit.SECONDS);
        }
    }
}
