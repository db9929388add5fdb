// What the sessions share: clients, payloads that tell what they are, and checks that say what was wrong.

import io.netty.buffer.PooledByteBufAllocator;
import java.lang.reflect.Method;
import java.nio.charset.StandardCharsets;
import java.util.Arrays;
import java.util.Enumeration;
import java.util.concurrent.Callable;
import org.apache.bookkeeper.client.BKException;
import org.apache.bookkeeper.client.BookKeeper;
import org.apache.bookkeeper.client.LedgerEntry;
import org.apache.bookkeeper.client.LedgerHandle;
import org.apache.bookkeeper.conf.ClientConfiguration;
import org.apache.bookkeeper.proto.checksum.DigestManager;

final class Checks {
    static final byte[] PASSWORD = "secret".getBytes(StandardCharsets.UTF_8);

    /** Something did not do what it does on Apache's own bookies. */
    static final class Wrong extends RuntimeException {
        Wrong(String message) {
            super(message);
        }
    }

    static ClientConfiguration configuration(String zookeeper) {
        ClientConfiguration conf = new ClientConfiguration();
        conf.setMetadataServiceUri("zk+hierarchical://" + zookeeper);
        conf.setAddEntryTimeout(5);
        conf.setReadEntryTimeout(5);
        conf.setThrottleValue(0); // by itself it takes at most 5,000 adds a second
        return conf;
    }

    /** Digests of CRC32C for version 3 of the wire. The type of what they are asked for is another one in each version. */
    static DigestManager digest(long ledger) throws Exception {
        for (Method each : DigestManager.class.getMethods()) {
            if (each.getName().equals("instantiate")) {
                Object kind = Arrays.stream(each.getParameterTypes()[2].getEnumConstants())
                        .filter(constant -> constant.toString().equals("CRC32C")).findFirst().get();
                return (DigestManager) each.invoke(
                        null, ledger, PASSWORD, kind, PooledByteBufAllocator.DEFAULT, false);
            }
        }
        throw new Wrong("there is no way to make a DigestManager");
    }

    static BookKeeper client(String zookeeper) throws Exception {
        return new BookKeeper(configuration(zookeeper));
    }

    /** What stands in an entry: its number, repeated to a length that depends on it. */
    static byte[] payload(long ledger, long entry, int size) {
        byte[] bytes = new byte[size];
        for (int i = 0; i < size; i++) {
            bytes[i] = (byte) (ledger * 31 + entry * 7 + i);
        }
        return bytes;
    }

    static byte[] payload(long ledger, long entry) {
        return payload(ledger, entry, (int) (entry * 37 % 200));
    }

    static void check(boolean holds, String what) {
        if (!holds) {
            throw new Wrong(what);
        }
    }

    static void same(Object found, Object wanted, String what) {
        check(wanted.equals(found), what + ": " + found + ", want " + wanted);
    }

    /** Every entry from `first` to `last` is there, in order, as it was written. */
    static void readAll(LedgerHandle ledger, long first, long last) throws Exception {
        for (long at = first; at <= last; at += 500) {
            Enumeration<LedgerEntry> entries = ledger.readEntries(at, Math.min(last, at + 499));
            for (long entry = at; entry <= Math.min(last, at + 499); entry++) {
                LedgerEntry found = entries.nextElement();
                same(found.getEntryId(), entry, "entry id");
                check(
                        Arrays.equals(found.getEntry(), payload(ledger.getId(), entry)),
                        "the payload of entry " + entry + " of ledger " + ledger.getId());
            }
            check(!entries.hasMoreElements(), "more entries than were asked for");
        }
    }

    /** The call fails with this code of org.apache.bookkeeper.client.api.BKException. */
    static void fails(int code, Callable<?> call, String what) throws Exception {
        try {
            call.call();
        } catch (Exception error) {
            same(codeOf(error), code, what + " failed by " + error + ", its code");
            return;
        }
        throw new Wrong(what + " did not fail, want code " + code);
    }

    static int codeOf(Throwable error) {
        for (Throwable each = error; each != null; each = each.getCause()) {
            if (each instanceof org.apache.bookkeeper.client.api.BKException) {
                return ((org.apache.bookkeeper.client.api.BKException) each).getCode();
            }
        }
        throw new Wrong("not an exception of BookKeeper's: " + error);
    }

    static void say(String text) {
        System.out.println(text);
        System.out.flush();
    }
}
