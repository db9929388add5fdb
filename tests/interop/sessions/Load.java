// As much as Apache's client writes to one ledger in a while. Arguments: host:port/path of the ledgers in ZooKeeper,
// adds in flight, bytes of an entry, seconds that count, seconds before that do not. Says "begun", then the figures.

import static org.apache.bookkeeper.client.api.BKException.Code;

import java.util.concurrent.Semaphore;
import java.util.concurrent.ThreadLocalRandom;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.concurrent.atomic.AtomicLong;
import org.apache.bookkeeper.client.BookKeeper;
import org.apache.bookkeeper.client.BookKeeper.DigestType;
import org.apache.bookkeeper.client.LedgerHandle;

public final class Load {
    public static void main(String[] arguments) throws Exception {
        BookKeeper client = Checks.client(arguments[0]);
        int window = Integer.parseInt(arguments[1]);
        byte[] payload = new byte[Integer.parseInt(arguments[2])];
        ThreadLocalRandom.current().nextBytes(payload);
        long counted = (long) (Double.parseDouble(arguments[3]) * 1e9);
        long begins = System.nanoTime() + (long) (Double.parseDouble(arguments[4]) * 1e9);
        LedgerHandle ledger = client.createLedger(3, 3, 2, DigestType.CRC32C, new byte[0]);
        AtomicInteger code = new AtomicInteger(Code.OK);
        AtomicLong confirmed = new AtomicLong();
        Semaphore slots = new Semaphore(window);
        boolean hasBegun = false;
        long began = 0;
        long before = 0;
        double spent = 0;
        while (code.get() == Code.OK) {
            long now = System.nanoTime();
            if (!hasBegun && now >= begins) {
                hasBegun = true;
                began = now;
                before = confirmed.get();
                spent = spentSeconds();
                Checks.say("begun");
            } else if (hasBegun && now - began >= counted) {
                Checks.say(String.format("{\"adds\": %d, \"took_s\": %.6f, \"cpu_s\": %.6f}",
                        confirmed.get() - before, (now - began) / 1e9, spentSeconds() - spent));
                break;
            }
            slots.acquire();
            ledger.asyncAddEntry(payload, (rc, handle, id, context) -> {
                if (rc == Code.OK) {
                    confirmed.incrementAndGet();
                } else {
                    code.compareAndSet(Code.OK, rc);
                }
                slots.release();
            }, null);
        }
        slots.acquire(window);
        ledger.close();
        System.exit(code.get() == Code.OK ? 0 : 1);
    }

    /** Of this process, its compiler and collector included. */
    private static double spentSeconds() {
        var system = (com.sun.management.OperatingSystemMXBean) java.lang.management.ManagementFactory.getOperatingSystemMXBean();
        return system.getProcessCpuTime() / 1e9;
    }
}
