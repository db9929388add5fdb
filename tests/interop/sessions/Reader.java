// Opens ledgers that Writer wrote, with recovery, and reads them. Arguments: host:port/path of the ledgers in ZooKeeper,
// then pairs of a ledger and the last entry that it must have at least. Says "read <ledger> <last entry>" for each.

import org.apache.bookkeeper.client.BookKeeper;
import org.apache.bookkeeper.client.BookKeeper.DigestType;
import org.apache.bookkeeper.client.LedgerHandle;

public final class Reader {
    public static void main(String[] arguments) throws Exception {
        BookKeeper client = Checks.client(arguments[0]);
        for (int at = 1; at < arguments.length; at += 2) {
            long id = Long.parseLong(arguments[at]);
            LedgerHandle ledger = client.openLedger(id, DigestType.CRC32C, new byte[0]);
            long last = ledger.getLastAddConfirmed();
            Checks.check(last >= Long.parseLong(arguments[at + 1]), "ledger " + id + " ends at " + last);
            Checks.readAll(ledger, 0, last);
            Checks.say("read " + id + " " + last);
        }
        System.exit(0);
    }
}
