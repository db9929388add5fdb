// As much as Apache's client writes to one ledger in a while. Arguments: host:port/path of the ledgers in ZooKeeper,
// adds in flight, bytes of an entry, seconds that count, seconds before that do not. Says "begun", then the figures.

import static org.apache.bookkeeper.client.api.BKException.Code;

import java.util.concurrent.Semaphore;
import java.util.concurrent.ThreadLocalRandom;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.concurrent.atomic.AtomicLong;
import org.apache.bookkeeper.client.BKException;
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
        Latencies latencies = new Latencies();
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
                latencies.begin();
                Checks.say("begun");
            } else if (hasBegun && now - began >= counted) {
                long adds = confirmed.get() - before;
                double took = (now - began) / 1e9;
                double cpu = spentSeconds() - spent;
                Checks.say(String.format(
                        "{\"adds\": %d, \"took_s\": %.6f, \"cpu_s\": %.6f, \"p50_us\": %d, \"p99_us\": %d}",
                        adds, took, cpu, latencies.share(50), latencies.share(99)));
                break;
            }
            slots.acquire();
            long sent = System.nanoTime();
            ledger.asyncAddEntry(payload, (rc, handle, id, context) -> {
                if (rc == Code.OK) {
                    confirmed.incrementAndGet();
                    latencies.add(System.nanoTime() - sent);
                } else {
                    code.compareAndSet(Code.OK, rc);
                }
                slots.release();
            }, null);
        }
        slots.acquire(window);
        if (code.get() != Code.OK) {
            Checks.say("an add failed: " + BKException.getMessage(code.get()));
        }
        ledger.close();
        System.exit(code.get() == Code.OK ? 0 : 1);
    }

    /** How long adds took, in microseconds. Callbacks of one ledger come one after the other. */
    private static final class Latencies {
        private static final int LONGEST_US = 5_000_000;
        private int[] counts = new int[LONGEST_US + 1];

        synchronized void add(long nanos) {
            counts[(int) Math.min(LONGEST_US, nanos / 1000)]++;
        }

        synchronized void begin() {
            counts = new int[LONGEST_US + 1];
        }

        /** What this percentage of the adds did not take longer than. */
        synchronized long share(int percent) {
            long all = 0;
            for (int each : counts) {
                all += each;
            }
            long seen = 0;
            for (int us = 0; us <= LONGEST_US; us++) {
                seen += counts[us];
                if (seen * 100 > all * percent) {
                    return us;
                }
            }
            return LONGEST_US;
        }
    }

    /** Of this process, its compiler and collector included. */
    private static double spentSeconds() {
        var system = (com.sun.management.OperatingSystemMXBean) java.lang.management.ManagementFactory.getOperatingSystemMXBean();
        return system.getProcessCpuTime() / 1e9;
    }
}
