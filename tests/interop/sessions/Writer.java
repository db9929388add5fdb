// A writer of Apache's that goes on until its standard input ends, then closes its ledger. Arguments: host:port/path of
// the ledgers in ZooKeeper, ensemble, write quorum, ack quorum, adds in flight. Says "ledger <id>", now and then
// "confirmed <entry>", and at its end "closed <entry>" or "failed <code> after <entry>".

import static org.apache.bookkeeper.client.api.BKException.Code;

import java.util.concurrent.Semaphore;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.concurrent.atomic.AtomicLong;
import org.apache.bookkeeper.client.BookKeeper;
import org.apache.bookkeeper.client.BookKeeper.DigestType;
import org.apache.bookkeeper.client.LedgerHandle;

public final class Writer {
    public static void main(String[] arguments) throws Exception {
        BookKeeper client = Checks.client(arguments[0]);
        int window = Integer.parseInt(arguments[4]);
        LedgerHandle ledger = client.createLedger(
                Integer.parseInt(arguments[1]), Integer.parseInt(arguments[2]), Integer.parseInt(arguments[3]),
                DigestType.CRC32C, new byte[0]);
        Checks.say("ledger " + ledger.getId());
        AtomicInteger code = new AtomicInteger(Code.OK);
        AtomicLong confirmed = new AtomicLong(-1);
        Semaphore slots = new Semaphore(window);
        long said = -1;
        long entry = 0;
        while (code.get() == Code.OK && System.in.available() == 0) {
            slots.acquire();
            ledger.asyncAddEntry(Checks.payload(ledger.getId(), entry++), (rc, handle, id, context) -> {
                if (rc == Code.OK) {
                    confirmed.set(id);
                } else {
                    code.compareAndSet(Code.OK, rc);
                }
                slots.release();
            }, null);
            if (confirmed.get() >= said + 50) {
                said = confirmed.get();
                Checks.say("confirmed " + said);
            }
            Thread.sleep(entry % 20 == 0 ? 10 : 0); // a few thousand a second: others want to live too
        }
        slots.acquire(window);
        if (code.get() != Code.OK) {
            Checks.say("failed " + code.get() + " after " + confirmed.get());
            System.exit(1);
        }
        ledger.close();
        Checks.say("closed " + ledger.getLastAddConfirmed());
        System.exit(0);
    }
}
