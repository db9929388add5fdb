import java.nio.ByteBuffer;
import java.util.Arrays;
import java.util.BitSet;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicLong;
import org.apache.pulsar.client.api.Consumer;
import org.apache.pulsar.client.api.Message;
import org.apache.pulsar.client.api.Producer;
import org.apache.pulsar.client.api.PulsarClient;
import org.apache.pulsar.client.api.SubscriptionInitialPosition;

/**
 * Writes and reads numbered messages, each an entry of its own, and reports what happened:
 * `Messages produce URL TOPIC BYTES` until a line arrives, `Messages consume URL TOPIC COUNT BYTES`.
 */
public class Messages {
    private static final int REPORT_EVERY = 500;
    private static final int WAIT_S = 60;

    public static void main(String[] words) throws Exception {
        PulsarClient client = PulsarClient.builder().serviceUrl(words[1]).build();
        if (words[0].equals("produce")) {
            produce(client, words[2], Integer.parseInt(words[3]));
        } else {
            consume(client, words[2], Integer.parseInt(words[3]), Integer.parseInt(words[4]));
        }
        client.close();
        System.exit(0);
    }

    private static void produce(PulsarClient client, String topic, int size) throws Exception {
        subscribe(client, topic).close(); // the subscription keeps the messages
        AtomicLong acknowledged = new AtomicLong();
        int sent = 0;
        try (Producer<byte[]> producer = client.newProducer().topic(topic).producerName("writer")
                .enableBatching(false).sendTimeout(0, TimeUnit.SECONDS).maxPendingMessages(200)
                .blockIfQueueFull(true).create()) {
            while (System.in.available() == 0) {
                producer.sendAsync(payload(sent++, size)).whenComplete((id, error) -> {
                    if (error != null) {
                        say("failed " + error);
                    } else if (acknowledged.incrementAndGet() % REPORT_EVERY == 0) {
                        say("acknowledged " + acknowledged.get());
                    }
                });
            }
            producer.flush();
        }
        say("end " + sent + " " + acknowledged.get());
    }

    private static void consume(PulsarClient client, String topic, int count, int size) throws Exception {
        BitSet seen = new BitSet();
        int received = 0;
        int doubled = 0;
        int reordered = 0;
        int damaged = 0;
        try (Consumer<byte[]> consumer = subscribe(client, topic)) {
            Message<byte[]> message;
            Message<byte[]> last = null;
            while ((message = consumer.receive(received < count ? WAIT_S : 2, TimeUnit.SECONDS)) != null) {
                last = message;
                byte[] data = message.getData();
                int number = data.length < Integer.BYTES ? -1 : ByteBuffer.wrap(data).getInt();
                if (number < 0 || number >= count || !Arrays.equals(data, payload(number, size))) {
                    damaged++;
                    continue;
                }
                doubled += seen.get(number) ? 1 : 0;
                reordered += number < seen.length() - 1 ? 1 : 0;
                seen.set(number);
                if (++received % REPORT_EVERY == 0) {
                    say("received " + received);
                }
            }
            if (last != null) {
                consumer.acknowledgeCumulative(last);
            }
        }
        say("end lost " + (count - seen.cardinality()) + " doubled " + doubled + " reordered " + reordered
                + " damaged " + damaged);
    }

    private static Consumer<byte[]> subscribe(PulsarClient client, String topic) throws Exception {
        return client.newConsumer().topic(topic).subscriptionName("reader")
                .subscriptionInitialPosition(SubscriptionInitialPosition.Earliest).subscribe();
    }

    /** Bytes that follow from the number, so that the reader knows each of them. */
    private static byte[] payload(int number, int size) {
        byte[] bytes = new byte[size];
        for (int i = Integer.BYTES; i < size; i++) {
            bytes[i] = (byte) (number * 31 + i);
        }
        ByteBuffer.wrap(bytes).putInt(number);
        return bytes;
    }

    private static synchronized void say(String line) {
        System.out.println(line);
        System.out.flush();
    }
}
