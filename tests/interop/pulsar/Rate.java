import com.sun.management.OperatingSystemMXBean;
import java.lang.management.ManagementFactory;
import java.util.Random;
import java.util.concurrent.Semaphore;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicLong;
import java.util.concurrent.atomic.AtomicLongArray;
import org.apache.pulsar.client.api.MessageIdAdv;
import org.apache.pulsar.client.api.Producer;
import org.apache.pulsar.client.api.PulsarClient;

/**
 * Keeps messages in flight on one topic: `Rate URL TOPIC BATCHED IN_FLIGHT BYTES SECONDS WARM_UP_SECONDS`.
 * Prints "begun" after the warm-up, then its figures as JSON.
 */
public class Rate {
    private static final int LONGEST_US = 10_000_000;

    public static void main(String[] words) throws Exception {
        byte[] payload = new byte[Integer.parseInt(words[4])];
        new Random(1).nextBytes(payload);
        long counted = (long) (Double.parseDouble(words[5]) * 1e9);
        long begins = System.nanoTime() + (long) (Double.parseDouble(words[6]) * 1e9);
        AtomicLong acknowledged = new AtomicLong();
        AtomicLong entries = new AtomicLong();
        AtomicLong failed = new AtomicLong();
        int inFlight = Integer.parseInt(words[3]);
        Semaphore slots = new Semaphore(inFlight);
        AtomicLongArray latencies = new AtomicLongArray(LONGEST_US + 1);
        PulsarClient client = PulsarClient.builder().serviceUrl(words[0]).build();
        Producer<byte[]> producer = client.newProducer().topic(words[1]).enableBatching(Boolean.parseBoolean(words[2]))
                .maxPendingMessages(inFlight).sendTimeout(0, TimeUnit.SECONDS).create();
        long began = 0;
        long before = 0;
        double spent = 0;
        while (true) {
            slots.acquire();
            long sent = System.nanoTime();
            if (began == 0 && sent >= begins) {
                began = sent;
                before = acknowledged.get();
                spent = spentSeconds();
                System.out.println("begun");
            } else if (began != 0 && sent - began >= counted) {
                System.out.printf("{\"adds\": %d, \"entries\": %d, \"took_s\": %.6f, \"cpu_s\": %.6f, "
                        + "\"p50_us\": %d, \"p99_us\": %d}%n", acknowledged.get() - before, entries.get(),
                        (sent - began) / 1e9, spentSeconds() - spent, share(latencies, 50), share(latencies, 99));
                break;
            }
            boolean isCounted = began != 0;
            producer.sendAsync(payload).whenComplete((id, error) -> {
                slots.release();
                if (error != null) {
                    failed.incrementAndGet();
                    return;
                }
                acknowledged.incrementAndGet();
                if (isCounted) {
                    entries.addAndGet(((MessageIdAdv) id).getBatchIndex() <= 0 ? 1 : 0);
                    latencies.incrementAndGet((int) Math.min(LONGEST_US, (System.nanoTime() - sent) / 1000));
                }
            });
        }
        producer.flush();
        client.close();
        System.exit(failed.get() == 0 ? 0 : 1);
    }

    /** What this percentage of the messages did not take longer than, in microseconds. */
    private static long share(AtomicLongArray counts, int percent) {
        long all = 0;
        for (int us = 0; us <= LONGEST_US; us++) {
            all += counts.get(us);
        }
        long seen = 0;
        for (int us = 0; us <= LONGEST_US; us++) {
            seen += counts.get(us);
            if (seen * 100 >= all * percent) {
                return us;
            }
        }
        return LONGEST_US;
    }

    private static double spentSeconds() {
        return ((OperatingSystemMXBean) ManagementFactory.getOperatingSystemMXBean()).getProcessCpuTime() / 1e9;
    }
}
