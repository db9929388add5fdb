// Apache BookKeeper's own client, both of its APIs, on four bookies that all live: what each call gives on Apache's own
// bookies, it gives here. Arguments: host:port/path of the ledgers in ZooKeeper, how many entries the longest ledger has,
// and the names of the cases to run (all of them if there are none). Says "ok <case>" or "failed <case> …" for each.

import static org.apache.bookkeeper.client.api.BKException.Code;

import io.netty.buffer.ByteBuf;
import io.netty.buffer.Unpooled;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.EnumSet;
import java.util.Enumeration;
import java.util.HashSet;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.Semaphore;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.concurrent.atomic.AtomicLong;
import org.apache.bookkeeper.auth.AuthCallbacks;
import org.apache.bookkeeper.auth.AuthToken;
import org.apache.bookkeeper.auth.ClientAuthProvider;
import org.apache.bookkeeper.client.BKException;
import org.apache.bookkeeper.client.BookKeeper;
import org.apache.bookkeeper.client.BookKeeper.DigestType;
import org.apache.bookkeeper.client.BookKeeperAdmin;
import org.apache.bookkeeper.client.LedgerEntry;
import org.apache.bookkeeper.client.LedgerHandle;
import org.apache.bookkeeper.client.api.LastConfirmedAndEntry;
import org.apache.bookkeeper.client.api.LedgerEntries;
import org.apache.bookkeeper.client.api.ReadHandle;
import org.apache.bookkeeper.client.api.WriteAdvHandle;
import org.apache.bookkeeper.client.api.WriteFlag;
import org.apache.bookkeeper.client.api.WriteHandle;
import org.apache.bookkeeper.conf.ClientConfiguration;
import org.apache.bookkeeper.net.BookieId;
import org.apache.bookkeeper.proto.BookieClient;
import org.apache.bookkeeper.proto.BookieProtocol;
import org.apache.bookkeeper.proto.ClientConnectionPeer;
import org.apache.bookkeeper.proto.checksum.DigestManager;

public final class ClientSession {
    private static final byte[] PASSWORD = Checks.PASSWORD;
    private static final int FRAME_MAX = 5 << 20;

    private final String zookeeper;
    private final int many;
    private final BookKeeper client;

    private ClientSession(String zookeeper, int many) throws Exception {
        this.zookeeper = zookeeper;
        this.many = many;
        this.client = Checks.client(zookeeper);
    }

    private interface Case {
        void run() throws Exception;
    }

    public static void main(String[] arguments) throws Exception {
        ClientSession session = new ClientSession(arguments[0], Integer.parseInt(arguments[1]));
        List<String> wanted = Arrays.asList(arguments).subList(2, arguments.length);
        int failed = 0;
        for (Map.Entry<String, Case> each : session.cases().entrySet()) {
            if (!wanted.isEmpty() && !wanted.contains(each.getKey())) {
                continue;
            }
            long began = System.nanoTime();
            try {
                each.getValue().run();
                Checks.say("ok " + each.getKey() + " " + (System.nanoTime() - began) / 1_000_000 + " ms");
            } catch (Throwable error) {
                failed++;
                Checks.say("failed " + each.getKey() + ": " + error);
                error.printStackTrace(System.out);
            }
        }
        session.client.close();
        System.exit(failed == 0 ? 0 : 1);
    }

    private Map<String, Case> cases() {
        Map<String, Case> cases = new LinkedHashMap<>();
        cases.put("quorums-and-digests", this::quorumsAndDigests);
        cases.put("new-api", this::newApi);
        cases.put("passwords", this::passwords);
        cases.put("keys-at-the-bookie", this::keysAtTheBookie);
        cases.put("many-in-flight", this::manyInFlight);
        cases.put("large-in-flight", this::largeInFlight);
        cases.put("sizes", this::sizes);
        cases.put("too-large", this::tooLarge);
        cases.put("reads", this::reads);
        cases.put("last-confirmed", this::lastConfirmed);
        cases.put("explicit-lac", this::explicitLac);
        cases.put("tail", this::tail);
        cases.put("fenced-writer", this::fencedWriter);
        cases.put("two-recoveries", this::twoRecoveries);
        cases.put("out-of-order", this::outOfOrder);
        cases.put("deferred-sync", this::deferredSync);
        cases.put("batch-reads", this::batchReads);
        cases.put("long-ids", this::longIds);
        cases.put("interleaved", this::interleaved);
        cases.put("lists", this::lists);
        cases.put("deleted", this::deleted);
        cases.put("own-auth", this::ownAuth);
        cases.put("tls", this::tls);
        cases.put("version-two", this::versionTwo);
        return cases;
    }

    private LedgerHandle create(int ensemble, int write, int ack) throws Exception {
        return client.createLedger(ensemble, write, ack, DigestType.CRC32C, PASSWORD);
    }

    private LedgerHandle open(long ledger) throws Exception {
        return client.openLedger(ledger, DigestType.CRC32C, PASSWORD);
    }

    private LedgerHandle peek(BookKeeper by, long ledger) throws Exception {
        return by.openLedgerNoRecovery(ledger, DigestType.CRC32C, PASSWORD);
    }

    private static void fill(LedgerHandle ledger, int entries) throws Exception {
        for (int entry = 0; entry < entries; entry++) {
            Checks.same(ledger.addEntry(Checks.payload(ledger.getId(), entry)), (long) entry, "entry id");
        }
    }

    private void quorumsAndDigests() throws Exception {
        int[][] quorums = {{3, 3, 2}, {3, 2, 2}, {1, 1, 1}, {4, 2, 2}, {4, 3, 2}};
        for (int[] quorum : quorums) {
            for (DigestType digest : DigestType.values()) {
                Map<String, byte[]> custom = new LinkedHashMap<>();
                custom.put("who", "java".getBytes());
                custom.put("nothing", new byte[0]);
                LedgerHandle ledger =
                        client.createLedger(quorum[0], quorum[1], quorum[2], digest, PASSWORD, custom);
                fill(ledger, 20);
                long length = ledger.getLength();
                ledger.close();
                LedgerHandle again = client.openLedger(ledger.getId(), digest, PASSWORD);
                Checks.same(again.getLastAddConfirmed(), 19L, "last entry");
                Checks.same(again.getLength(), length, "length");
                Checks.readAll(again, 0, 19);
                Checks.check(
                        Arrays.equals(again.getCustomMetadata().get("who"), "java".getBytes())
                                && again.getCustomMetadata().get("nothing").length == 0,
                        "the custom metadata");
                Checks.check(client.isClosed(ledger.getId()), "closed");
                again.close();
            }
        }
    }

    private void newApi() throws Exception {
        for (org.apache.bookkeeper.client.api.DigestType digest :
                org.apache.bookkeeper.client.api.DigestType.values()) {
            WriteHandle writer = client.newCreateLedgerOp()
                    .withEnsembleSize(3).withWriteQuorumSize(3).withAckQuorumSize(2)
                    .withDigestType(digest).withPassword(PASSWORD).execute().get();
            for (int entry = 0; entry < 10; entry++) {
                Checks.same(writer.append(Checks.payload(writer.getId(), entry)), (long) entry, "entry id");
            }
            Checks.same(writer.getLastAddConfirmed(), 9L, "last add confirmed");
            writer.close();
            try (ReadHandle reader = client.newOpenLedgerOp().withLedgerId(writer.getId()).withRecovery(true)
                            .withDigestType(digest).withPassword(PASSWORD).execute().get();
                    LedgerEntries entries = reader.read(0, 9)) {
                for (org.apache.bookkeeper.client.api.LedgerEntry entry : entries) {
                    Checks.check(
                            Arrays.equals(entry.getEntryBytes(), Checks.payload(writer.getId(), entry.getEntryId())),
                            "the payload of entry " + entry.getEntryId());
                }
            }
        }
    }

    private void passwords() throws Exception {
        LedgerHandle ledger = create(3, 3, 2);
        fill(ledger, 5);
        byte[] wrong = "wrong".getBytes();
        Checks.fails(Code.UnauthorizedAccessException,
                () -> client.openLedger(ledger.getId(), DigestType.CRC32C, wrong), "opening with a wrong password");
        Checks.fails(Code.UnauthorizedAccessException,
                () -> client.openLedgerNoRecovery(ledger.getId(), DigestType.CRC32C, wrong), "peeking with one");
        Checks.fails(Code.NoSuchLedgerExistsOnMetadataServerException,
                () -> open(Integer.MAX_VALUE - 7), "opening what never was");
        ledger.addEntry(Checks.payload(ledger.getId(), 5)); // nobody has fenced it
        ledger.close();
    }

    /** One answer of one bookie, as BookieClient gives it: without the checks that a ledger handle makes first. */
    private int raw(Sender sender) throws Exception {
        CompletableFuture<Integer> code = new CompletableFuture<>();
        sender.send(client.getClientCtx().getBookieClient(), code);
        return code.get(20, TimeUnit.SECONDS);
    }

    private interface Sender {
        void send(BookieClient bookies, CompletableFuture<Integer> code) throws Exception;
    }

    private int rawAdd(BookieId bookie, long ledger, long entry, byte[] key, int flags) throws Exception {
        DigestManager digest = Checks.digest(ledger);
        byte[] payload = Checks.payload(ledger, entry);
        ByteBuf data = Unpooled.wrappedBuffer(payload);
        return raw((bookies, code) -> bookies.addEntry(
                bookie, ledger, key, entry,
                digest.computeDigestAndPackageForSending(entry, entry - 1, payload.length, data, key, flags),
                (rc, l, e, address, context) -> code.complete(rc), null, flags, false, WriteFlag.NONE));
    }

    private int rawRead(BookieId bookie, long ledger, long entry, int flags, byte[] key) throws Exception {
        return raw((bookies, code) -> bookies.readEntry(
                bookie, ledger, entry, (rc, l, e, buffer, context) -> code.complete(rc), null, flags, key));
    }

    private void keysAtTheBookie() throws Exception {
        LedgerHandle ledger = create(3, 3, 2);
        fill(ledger, 3);
        long id = ledger.getId();
        byte[] right = DigestManager.generateMasterKey(PASSWORD);
        byte[] wrong = DigestManager.generateMasterKey("wrong".getBytes());
        int fencing = BookieProtocol.FLAG_DO_FENCING;
        for (BookieId bookie : ledger.getLedgerMetadata().getAllEnsembles().get(0L)) {
            Checks.same(rawAdd(bookie, id, 3, wrong, BookieProtocol.FLAG_NONE), Code.UnauthorizedAccessException, "add");
            Checks.same(rawAdd(bookie, id, 3, wrong, BookieProtocol.FLAG_RECOVERY_ADD),
                    Code.UnauthorizedAccessException, "recovery add");
            Checks.same(rawRead(bookie, id, 0, fencing, wrong), Code.UnauthorizedAccessException, "fence");
            Checks.same(rawRead(bookie, id, 0, 0, null), Code.OK, "read");
            Checks.same(rawRead(bookie, id, 99, 0, null), Code.NoSuchEntryException, "read of what is not there");
            Checks.same(rawRead(bookie, 1L << 30, 0, 0, null), Code.NoSuchLedgerExistsException, "read of no ledger");
        }
        ledger.addEntry(Checks.payload(id, 3)); // not fenced by any of these
        for (BookieId bookie : ledger.getLedgerMetadata().getAllEnsembles().get(0L)) {
            Checks.same(rawRead(bookie, id, 0, fencing, right), Code.OK, "fence");
            Checks.same(rawAdd(bookie, id, 4, right, BookieProtocol.FLAG_NONE), Code.LedgerFencedException, "late add");
            Checks.same(rawAdd(bookie, id, 4, right, BookieProtocol.FLAG_RECOVERY_ADD), Code.OK, "recovery add");
        }
        Checks.fails(Code.LedgerFencedException, () -> ledger.addEntry(new byte[1]), "an add of the writer");
    }

    private void manyInFlight() throws Exception {
        LedgerHandle ledger = create(3, 3, 2);
        Semaphore slots = new Semaphore(1000);
        AtomicInteger failed = new AtomicInteger();
        AtomicLong last = new AtomicLong(-1);
        AtomicInteger disorder = new AtomicInteger();
        for (int entry = 0; entry < many; entry++) {
            slots.acquire();
            ledger.asyncAddEntry(Checks.payload(ledger.getId(), entry), (rc, handle, id, context) -> {
                failed.addAndGet(rc == Code.OK ? 0 : 1);
                disorder.addAndGet(last.getAndSet(id) == id - 1 ? 0 : 1);
                slots.release();
            }, null);
        }
        slots.acquire(1000);
        Checks.same(failed.get(), 0, "failed adds");
        Checks.same(disorder.get(), 0, "answers out of order");
        ledger.close();
        Checks.readAll(open(ledger.getId()), 0, many - 1);
    }

    private void largeInFlight() throws Exception {
        ClientConfiguration conf = Checks.configuration(zookeeper);
        conf.setAddEntryTimeout(60); // the question is whether they are refused, not how fast this machine is
        try (BookKeeper patient = new BookKeeper(conf)) {
            LedgerHandle ledger = patient.createLedger(3, 3, 2, DigestType.CRC32C, PASSWORD);
            AtomicInteger failed = new AtomicInteger();
            Semaphore slots = new Semaphore(80);
            for (int entry = 0; entry < 100; entry++) {
                slots.acquire();
                ledger.asyncAddEntry(Checks.payload(ledger.getId(), entry, 1 << 20), (rc, handle, id, context) -> {
                    failed.addAndGet(rc == Code.OK ? 0 : 1);
                    slots.release();
                }, null);
            }
            slots.acquire(80);
            Checks.same(failed.get(), 0, "failed adds");
            Checks.same(ledger.getLedgerMetadata().getAllEnsembles().size(), 1, "ensembles: nobody was too slow");
            ledger.close();
            for (int entry = 0; entry < 100; entry++) {
                Checks.check(
                        Arrays.equals(ledger.readEntries(entry, entry).nextElement().getEntry(),
                                Checks.payload(ledger.getId(), entry, 1 << 20)),
                        "the payload of entry " + entry);
            }
            patient.deleteLedger(ledger.getId());
        }
    }

    private void sizes() throws Exception {
        LedgerHandle ledger = create(3, 3, 2);
        int[] sizes = {0, 1, 31, 32, 4096, (1 << 20) - 100, 1 << 20, FRAME_MAX - 1024, 0};
        for (int entry = 0; entry < sizes.length; entry++) {
            ledger.addEntry(Checks.payload(ledger.getId(), entry, sizes[entry]));
        }
        // A recovery reads and writes back what stands behind the last add confirmed: the large one too.
        LedgerHandle again = client.openLedger(ledger.getId(), DigestType.CRC32C, PASSWORD);
        Enumeration<LedgerEntry> entries = again.readEntries(0, sizes.length - 1);
        for (int entry = 0; entry < sizes.length; entry++) {
            Checks.check(
                    Arrays.equals(entries.nextElement().getEntry(), Checks.payload(ledger.getId(), entry, sizes[entry])),
                    "an entry of " + sizes[entry] + " bytes");
        }
    }

    /** Java's client turns from one bookie that cannot take an entry to the next, for ever. */
    private static void neverStored(BookKeeper by, int size) throws Exception {
        LedgerHandle ledger = by.createLedger(3, 3, 2, DigestType.CRC32C, PASSWORD);
        AtomicInteger stored = new AtomicInteger();
        ledger.asyncAddEntry(new byte[size], (rc, handle, id, context) -> stored.addAndGet(rc == Code.OK ? 1 : 0), null);
        Thread.sleep(1000);
        Checks.same(stored.get(), 0, "stored entries of " + size + " bytes");
    }

    private void tooLarge() throws Exception {
        LedgerHandle ledger = create(3, 3, 2);
        ledger.addEntry(Checks.payload(ledger.getId(), 0));
        for (int size : new int[] {FRAME_MAX - 100, 8 << 20}) {
            try (BookKeeper other = Checks.client(zookeeper)) {
                neverStored(other, size);
            }
        }
        ledger.addEntry(Checks.payload(ledger.getId(), 1)); // others do not notice
        ledger.close();
        Checks.readAll(open(ledger.getId()), 0, 1);
    }

    private void reads() throws Exception {
        LedgerHandle ledger = create(3, 2, 2);
        fill(ledger, 100);
        Checks.readAll(ledger, 0, 99);
        Checks.readAll(ledger, 0, 0);
        Checks.readAll(ledger, 99, 99);
        Checks.readAll(ledger, 37, 61);
        Checks.fails(Code.ReadException, () -> ledger.readEntries(99, 100), "a read beyond the last add confirmed");
        Checks.fails(Code.IncorrectParameterException, () -> ledger.readEntries(5, 4), "a read that ends before it begins");
        Checks.fails(Code.IncorrectParameterException, () -> ledger.readEntries(-1, 4), "a read before the beginning");
        LedgerHandle reader = peek(client, ledger.getId());
        Checks.check(reader.getLastAddConfirmed() >= 98, "a peek knows all but the last entry, at least");
        Enumeration<LedgerEntry> unconfirmed = reader.readUnconfirmedEntries(90, 99);
        for (int entry = 90; entry <= 99; entry++) {
            Checks.same(unconfirmed.nextElement().getEntryId(), (long) entry, "unconfirmed entry");
        }
        Checks.fails(Code.NoSuchEntryException, () -> reader.readUnconfirmedEntries(99, 100), "an unconfirmed read too far");
        ledger.close();
        Checks.same(open(ledger.getId()).readLastEntry().getEntryId(), 99L, "the last entry");
        LedgerHandle empty = create(3, 3, 2);
        empty.close();
        Checks.same(open(empty.getId()).getLastAddConfirmed(), -1L, "the end of an empty ledger");
        Checks.fails(Code.NoSuchEntryException, () -> open(empty.getId()).readLastEntry(), "the last entry of none");
    }

    private void lastConfirmed() throws Exception {
        try (BookKeeper other = Checks.client(zookeeper)) {
            LedgerHandle ledger = create(3, 3, 2);
            LedgerHandle reader = peek(other, ledger.getId());
            Checks.same(reader.readLastConfirmed(), -1L, "last confirmed of an empty ledger");
            Checks.same(reader.tryReadLastConfirmed(), -1L, "the same by one bookie");
            Checks.same(reader.readExplicitLastConfirmed(), -1L, "the same, explicit");
            fill(ledger, 10);
            Checks.same(reader.readLastConfirmed(), 8L, "last confirmed of ten entries");
            Checks.check(reader.tryReadLastConfirmed() >= 7, "the same by one bookie");
            long began = System.nanoTime();
            LastConfirmedAndEntry polled = reader.readLastAddConfirmedAndEntryAsync(0, 1000, false).get();
            Checks.check(polled.hasEntry() && polled.getEntry().getEntryId() == 0, "a poll for what is there brings it");
            Checks.check(System.nanoTime() - began < 900_000_000L, "and at once");
            CompletableFuture<LastConfirmedAndEntry> waiting =
                    reader.readLastAddConfirmedAndEntryAsync(9, 10_000, false);
            Thread.sleep(300);
            Checks.check(!waiting.isDone(), "a poll waits");
            ledger.addEntry(Checks.payload(ledger.getId(), 10));
            LastConfirmedAndEntry woken = waiting.get(5, TimeUnit.SECONDS);
            Checks.same(woken.getLastAddConfirmed(), 9L, "what woke it");
            Checks.check(woken.hasEntry() && woken.getEntry().getEntryId() == 9, "and it brings the entry");
            began = System.nanoTime();
            LastConfirmedAndEntry vain = reader.readLastAddConfirmedAndEntryAsync(12, 500, true).get(10, TimeUnit.SECONDS);
            Checks.check(!vain.hasEntry(), "a poll in vain has no entry");
            Checks.check(System.nanoTime() - began > 400_000_000L, "and has waited");
            ledger.close();
        }
    }

    private void explicitLac() throws Exception {
        ClientConfiguration conf = Checks.configuration(zookeeper);
        conf.setExplictLacInterval(100);
        try (BookKeeper writing = new BookKeeper(conf)) {
            for (DigestType digest : DigestType.values()) {
                LedgerHandle ledger = writing.createLedger(3, 3, 2, digest, PASSWORD);
                fill(ledger, 10);
                LedgerHandle reader = client.openLedgerNoRecovery(ledger.getId(), digest, PASSWORD);
                long deadline = System.nanoTime() + 10_000_000_000L;
                while (reader.readExplicitLastConfirmed() < 9) {
                    Checks.check(System.nanoTime() < deadline, digest + ": the explicit last add confirmed comes");
                    Thread.sleep(20);
                }
                Checks.same(reader.readLastConfirmed(), 9L, digest + ": last confirmed");
                LastConfirmedAndEntry polled = reader.readLastAddConfirmedAndEntryAsync(9, 2000, false).get();
                Checks.check(polled.hasEntry(), digest + ": a poll brings the last entry");
                Checks.readAll(reader, 0, 9);
                ledger.close();
            }
        }
    }

    private void tail() throws Exception {
        try (BookKeeper other = Checks.client(zookeeper)) {
            LedgerHandle ledger = create(3, 3, 2);
            int entries = 2000;
            CompletableFuture<Long> tailed = CompletableFuture.supplyAsync(() -> {
                try {
                    LedgerHandle reader = peek(other, ledger.getId());
                    long next = 0;
                    while (next < entries) {
                        LastConfirmedAndEntry got = reader.readLastAddConfirmedAndEntryAsync(next, 2000, false).get();
                        if (got.hasEntry()) {
                            Checks.same(got.getEntry().getEntryId(), next, "tailed entry");
                            Checks.check(
                                    Arrays.equals(got.getEntry().getEntryBytes(), Checks.payload(ledger.getId(), next)),
                                    "the payload of tailed entry " + next);
                            next++;
                        }
                        if (got.getLastAddConfirmed() >= next) {
                            Checks.readAll(reader, next, got.getLastAddConfirmed());
                            next = got.getLastAddConfirmed() + 1;
                        }
                        got.close();
                    }
                    return next;
                } catch (Exception error) {
                    throw new RuntimeException(error);
                }
            });
            fill(ledger, entries);
            ledger.close();
            Checks.same(tailed.get(30, TimeUnit.SECONDS), (long) entries, "entries tailed");
        }
    }

    /** Writes with 100 in flight until an add fails. Gives the last entry that was confirmed, and the failure's code. */
    private static CompletableFuture<long[]> writeUntilRefused(LedgerHandle ledger) {
        CompletableFuture<long[]> end = new CompletableFuture<>();
        AtomicLong confirmed = new AtomicLong(-1);
        Semaphore slots = new Semaphore(100);
        Thread thread = new Thread(() -> {
            for (int entry = 0; !end.isDone(); entry++) {
                slots.acquireUninterruptibly();
                ledger.asyncAddEntry(Checks.payload(ledger.getId(), entry), (rc, handle, id, context) -> {
                    slots.release();
                    if (rc == Code.OK) {
                        confirmed.set(id);
                    } else {
                        end.complete(new long[] {confirmed.get(), rc});
                    }
                }, null);
            }
        });
        thread.setDaemon(true);
        thread.start();
        return end;
    }

    private void fencedWriter() throws Exception {
        for (int[] quorum : new int[][] {{3, 3, 2}, {4, 2, 2}, {3, 3, 3}}) {
            try (BookKeeper other = Checks.client(zookeeper)) {
                LedgerHandle ledger = create(quorum[0], quorum[1], quorum[2]);
                CompletableFuture<long[]> writer = writeUntilRefused(ledger);
                while (ledger.getLastAddConfirmed() < 500 && !writer.isDone()) {
                    Thread.sleep(1);
                }
                LedgerHandle recovered = other.openLedger(ledger.getId(), DigestType.CRC32C, PASSWORD);
                long[] end = writer.get(20, TimeUnit.SECONDS);
                Checks.same(end[1], (long) Code.LedgerFencedException, "what the writer is told");
                Checks.check(recovered.getLastAddConfirmed() >= end[0],
                        "entry " + end[0] + " was confirmed, the recovery ended at " + recovered.getLastAddConfirmed());
                Checks.readAll(recovered, 0, recovered.getLastAddConfirmed());
            }
        }
    }

    private void twoRecoveries() throws Exception {
        for (int round = 0; round < 5; round++) {
            try (BookKeeper first = Checks.client(zookeeper); BookKeeper second = Checks.client(zookeeper)) {
                LedgerHandle ledger = create(3, 3, 2);
                CompletableFuture<long[]> writer = writeUntilRefused(ledger);
                while (ledger.getLastAddConfirmed() < 200 && !writer.isDone()) {
                    Thread.sleep(1);
                }
                List<CompletableFuture<Long>> ends = new ArrayList<>();
                for (BookKeeper each : List.of(first, second)) {
                    ends.add(CompletableFuture.supplyAsync(() -> {
                        try {
                            return each.openLedger(ledger.getId(), DigestType.CRC32C, PASSWORD).getLastAddConfirmed();
                        } catch (Exception error) {
                            throw new RuntimeException(error);
                        }
                    }));
                }
                Checks.same(ends.get(0).get(), ends.get(1).get(), "where two recoveries end");
                Checks.check(ends.get(0).get() >= writer.get(20, TimeUnit.SECONDS)[0], "nothing confirmed is lost");
            }
        }
    }

    private void outOfOrder() throws Exception {
        WriteAdvHandle writer = client.newCreateLedgerOp()
                .withEnsembleSize(3).withWriteQuorumSize(3).withAckQuorumSize(2).withPassword(PASSWORD)
                .withDigestType(org.apache.bookkeeper.client.api.DigestType.CRC32C).makeAdv().execute().get();
        long id = writer.getId();
        Map<Integer, CompletableFuture<Long>> sent = new LinkedHashMap<>();
        for (int entry : new int[] {7, 3, 5, 1, 9, 2, 8, 6, 4}) {
            sent.put(entry, writer.writeAsync(entry, Checks.payload(id, entry)));
        }
        Thread.sleep(300);
        Checks.check(sent.values().stream().noneMatch(CompletableFuture::isDone), "nothing is confirmed before entry 0");
        sent.put(0, writer.writeAsync(0, Checks.payload(id, 0)));
        for (Map.Entry<Integer, CompletableFuture<Long>> each : sent.entrySet()) {
            Checks.same(each.getValue().get(10, TimeUnit.SECONDS), (long) each.getKey(), "entry id");
        }
        Checks.fails(Code.DuplicateEntryIdException, () -> writer.write(4, new byte[1]), "an entry for the second time");
        // A gap that is never filled: what stands behind it was never confirmed, and a recovery drops it.
        writer.writeAsync(12, Checks.payload(id, 12));
        Thread.sleep(200);
        LedgerHandle recovered = open(id);
        Checks.same(recovered.getLastAddConfirmed(), 9L, "the end before the gap");
        Checks.readAll(recovered, 0, 9);
        Checks.fails(Code.LedgerFencedException, () -> writer.write(10, new byte[1]), "an add of the former writer");
    }

    private void deferredSync() throws Exception {
        WriteHandle writer = client.newCreateLedgerOp()
                .withEnsembleSize(3).withWriteQuorumSize(3).withAckQuorumSize(2).withPassword(PASSWORD)
                .withWriteFlags(EnumSet.of(WriteFlag.DEFERRED_SYNC))
                .withDigestType(org.apache.bookkeeper.client.api.DigestType.CRC32C).execute().get();
        for (int entry = 0; entry < 50; entry++) {
            writer.append(Checks.payload(writer.getId(), entry));
        }
        Checks.same(writer.getLastAddConfirmed(), -1L, "last add confirmed before the force");
        writer.force().get(10, TimeUnit.SECONDS);
        Checks.same(writer.getLastAddConfirmed(), 49L, "last add confirmed after it");
        writer.append(Checks.payload(writer.getId(), 50));
        writer.force().get(10, TimeUnit.SECONDS);
        writer.close();
        Checks.readAll(open(writer.getId()), 0, 50);
    }

    private void batchReads() throws Exception {
        LedgerHandle ledger = create(3, 3, 2);
        fill(ledger, 100);
        ledger.close();
        ClientConfiguration conf = Checks.configuration(zookeeper);
        conf.setBatchReadEnabled(false);
        try (BookKeeper single = new BookKeeper(conf)) {
            batch(single.openLedger(ledger.getId(), DigestType.CRC32C, PASSWORD));
        }
    }

    private static void batch(LedgerHandle ledger) throws Exception {
        long next = 0;
        while (next < 100) {
            Enumeration<LedgerEntry> entries = ledger.batchReadEntries(next, 30, 4096);
            Checks.check(entries.hasMoreElements(), "a batch brings something");
            while (entries.hasMoreElements()) {
                LedgerEntry entry = entries.nextElement();
                Checks.same(entry.getEntryId(), next, "batched entry");
                Checks.check(Arrays.equals(entry.getEntry(), Checks.payload(ledger.getId(), next)), "its payload");
                next++;
            }
        }
        Checks.same(next, 100L, "entries in batches");
    }

    private void longIds() throws Exception {
        for (long id : new long[] {Integer.MAX_VALUE, 1L << 33, Long.MAX_VALUE - 1}) {
            LedgerHandle ledger = client.createLedgerAdv(id, 3, 3, 2, DigestType.MAC, PASSWORD, null);
            Checks.same(ledger.getId(), id, "ledger id");
            for (int entry = 0; entry < 5; entry++) {
                ledger.addEntry(entry, Checks.payload(id, entry));
            }
            LedgerHandle recovered = client.openLedger(id, DigestType.MAC, PASSWORD);
            Checks.readAll(recovered, 0, 4);
            Checks.fails(Code.LedgerExistException,
                    () -> client.createLedgerAdv(id, 3, 3, 2, DigestType.MAC, PASSWORD, null), "an id that is taken");
            client.deleteLedger(id);
        }
    }

    private void interleaved() throws Exception {
        List<LedgerHandle> ledgers = new ArrayList<>();
        for (int i = 0; i < 300; i++) {
            ledgers.add(create(3, 3, 2));
        }
        Semaphore slots = new Semaphore(6000);
        AtomicInteger failed = new AtomicInteger();
        for (int entry = 0; entry < 20; entry++) { // their first adds come together, before any of them is known
            for (LedgerHandle ledger : ledgers) {
                slots.acquire();
                ledger.asyncAddEntry(Checks.payload(ledger.getId(), entry), (rc, handle, id, context) -> {
                    failed.addAndGet(rc == Code.OK ? 0 : 1);
                    slots.release();
                }, null);
            }
        }
        slots.acquire(6000);
        Checks.same(failed.get(), 0, "failed adds");
        for (LedgerHandle ledger : ledgers) {
            Checks.same(ledger.getLedgerMetadata().getAllEnsembles().size(), 1, "ensembles: nobody was too slow");
            Checks.readAll(ledger, 0, 19);
            ledger.close();
        }
    }

    private void lists() throws Exception {
        LedgerHandle ledger = create(4, 2, 2);
        fill(ledger, 40);
        ledger.close();
        Checks.check(client.getBookieInfo().size() == 4, "the space of four bookies");
        client.getBookieInfo().values().forEach(info -> Checks.check(
                info.getFreeDiskSpace() > 0 && info.getTotalDiskSpace() >= info.getFreeDiskSpace(), "" + info));
        Set<Long> listed = new HashSet<>();
        client.newListLedgersOp().execute().get().toIterable().forEach(listed::add);
        Checks.check(listed.contains(ledger.getId()), "the new ledger is listed");
        try (BookKeeperAdmin admin = new BookKeeperAdmin(client, Checks.configuration(zookeeper))) {
            Set<Long> same = new HashSet<>();
            admin.listLedgers().forEach(same::add);
            Checks.same(same, listed, "the administrator's list");
            List<BookieId> ensemble = ledger.getLedgerMetadata().getAllEnsembles().get(0L);
            for (int place = 0; place < 4; place++) {
                var here = admin.asyncGetListOfEntriesOfLedger(ensemble.get(place), ledger.getId()).get();
                Checks.same(here.getTotalNumOfAvailableEntries(), 20L, "entries at one bookie");
                for (int entry = 0; entry < 40; entry++) {
                    boolean wanted = entry % 4 == place || (entry + 1) % 4 == place;
                    Checks.same(here.isEntryAvailable(entry), wanted, "entry " + entry + " at place " + place);
                }
            }
            Checks.fails(Code.NoSuchLedgerExistsException,
                    () -> admin.asyncGetListOfEntriesOfLedger(ensemble.get(0), 1L << 29).get(), "a list of nothing");
        }
    }

    private void deleted() throws Exception {
        LedgerHandle ledger = create(3, 3, 2);
        fill(ledger, 10);
        ledger.close();
        LedgerHandle reader = open(ledger.getId());
        client.deleteLedger(ledger.getId());
        client.deleteLedger(ledger.getId()); // twice is fine
        Checks.fails(Code.NoSuchLedgerExistsOnMetadataServerException, () -> open(ledger.getId()), "opening it");
        long deadline = System.nanoTime() + 20_000_000_000L;
        while (true) { // the bookies drop it when they look for what was deleted
            try {
                reader.readEntries(0, 9);
                Checks.check(System.nanoTime() < deadline, "the bookies drop what was deleted");
                Thread.sleep(100);
            } catch (BKException error) {
                Checks.same(error.getCode(), Code.NoSuchLedgerExistsException, "what a reader is told");
                break;
            }
        }
    }

    /** A plug-in that bookies without authentication do not know. */
    public static final class Greeting implements ClientAuthProvider.Factory {
        @Override
        public void init(ClientConfiguration conf) {}

        @Override
        public String getPluginName() {
            return "greeting";
        }

        @Override
        public ClientAuthProvider newProvider(
                ClientConnectionPeer connection, AuthCallbacks.GenericCallback<Void> complete) {
            return new ClientAuthProvider() {
                @Override
                public void init(AuthCallbacks.GenericCallback<AuthToken> callback) {
                    callback.operationComplete(Code.OK, AuthToken.wrap("hello".getBytes()));
                }

                @Override
                public void process(AuthToken token, AuthCallbacks.GenericCallback<AuthToken> callback) {
                    complete.operationComplete(Code.OK, null);
                }
            };
        }
    }

    private void ownAuth() throws Exception {
        ClientConfiguration conf = Checks.configuration(zookeeper);
        conf.setClientAuthProviderFactoryClass(Greeting.class.getName());
        roundTrip(conf);
        conf.setUseV2WireProtocol(true);
        roundTrip(conf);
    }

    private long roundTrip(ClientConfiguration conf) throws Exception {
        try (BookKeeper other = new BookKeeper(conf)) {
            LedgerHandle ledger = other.createLedger(3, 3, 2, DigestType.CRC32C, PASSWORD);
            fill(ledger, 10);
            ledger.close();
            Checks.readAll(other.openLedger(ledger.getId(), DigestType.CRC32C, PASSWORD), 0, 9);
            return ledger.getId();
        }
    }

    private void tls() throws Exception {
        ClientConfiguration conf = Checks.configuration(zookeeper);
        conf.setTLSProviderFactoryClass(org.apache.bookkeeper.tls.TLSContextFactory.class.getName());
        conf.setTLSProvider("JDK");
        Path password = Files.writeString(Files.createTempFile("session", ".password"), "changeit");
        conf.setTLSTrustStoreType("JKS");
        conf.setTLSTrustStore(System.getProperty("java.home") + "/lib/security/cacerts");
        conf.setTLSTrustStorePasswordPath(password.toString());
        try (BookKeeper other = new BookKeeper(conf)) {
            neverStored(other, 1);
        }
        roundTrip(Checks.configuration(zookeeper));
    }

    private void versionTwo() throws Exception {
        ClientConfiguration conf = Checks.configuration(zookeeper);
        conf.setUseV2WireProtocol(true);
        long id = roundTrip(conf);
        Checks.readAll(open(id), 0, 9); // what the one wrote the other reads
        try (BookKeeper other = new BookKeeper(conf)) {
            LedgerHandle ledger = create(3, 3, 2);
            CompletableFuture<long[]> writer = writeUntilRefused(ledger);
            while (ledger.getLastAddConfirmed() < 500 && !writer.isDone()) {
                Thread.sleep(1);
            }
            LedgerHandle recovered = other.openLedger(ledger.getId(), DigestType.CRC32C, PASSWORD);
            long[] end = writer.get(20, TimeUnit.SECONDS);
            Checks.same(end[1], (long) Code.LedgerFencedException, "what the writer is told");
            Checks.check(recovered.getLastAddConfirmed() >= end[0], "nothing confirmed is lost");
            Checks.readAll(recovered, 0, recovered.getLastAddConfirmed());
            Checks.fails(Code.NoSuchEntryException,
                    () -> recovered.readUnconfirmedEntries(1 << 20, 1 << 20), "a read of what is not there");
            LedgerHandle fenced = other.createLedger(3, 3, 2, DigestType.CRC32C, PASSWORD);
            CompletableFuture<long[]> second = writeUntilRefused(fenced);
            while (fenced.getLastAddConfirmed() < 200 && !second.isDone()) {
                Thread.sleep(1);
            }
            open(fenced.getId());
            Checks.same(second.get(20, TimeUnit.SECONDS)[1], (long) Code.LedgerFencedException, "a writer of version 2");
            LedgerHandle kept = other.createLedger(3, 3, 2, DigestType.CRC32C, PASSWORD);
            fill(kept, 100);
            kept.close();
            batch(other.openLedger(kept.getId(), DigestType.CRC32C, PASSWORD));
        }
    }
}
