// Apache's client and START_TLS. Arguments: host:port/path of the ledgers in ZooKeeper, the file of the trusted
// authority, those of a certificate and its key, and cases. A case is three words with commas between: JDK, OpenSSL or
// none (no TLS); 3 or 2, the version of the wire; cert or bare, whether the certificate is shown. Says
// "stored <case> <ledger>" where a ledger was written and read, and "refused <case>" where nothing could be stored.

import java.util.concurrent.CompletableFuture;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.TimeoutException;
import org.apache.bookkeeper.client.BKException;
import org.apache.bookkeeper.client.BookKeeper;
import org.apache.bookkeeper.client.BookKeeper.DigestType;
import org.apache.bookkeeper.client.LedgerHandle;
import org.apache.bookkeeper.conf.ClientConfiguration;
import org.apache.bookkeeper.tls.TLSContextFactory;

public final class Secured {
    private static final int ENTRIES = 300;
    private static final int LARGE = 200_000;

    public static void main(String[] arguments) throws Exception {
        for (int at = 4; at < arguments.length; at++) {
            String[] words = arguments[at].split(",");
            ClientConfiguration conf = Checks.configuration(arguments[0]);
            conf.setUseV2WireProtocol(words[1].equals("2"));
            if (!words[0].equals("none")) {
                conf.setTLSProviderFactoryClass(TLSContextFactory.class.getName());
                conf.setTLSProvider(words[0]);
                conf.setTLSTrustStoreType("PEM");
                conf.setTLSTrustStore(arguments[1]);
                conf.setTLSClientAuthentication(words[2].equals("cert"));
                conf.setTLSCertificatePath(arguments[2]);
                conf.setTLSKeyStoreType("PEM");
                conf.setTLSKeyStore(arguments[3]);
            }
            try (BookKeeper client = new BookKeeper(conf)) {
                Checks.say(roundTrip(client, arguments[at]));
            }
        }
        System.exit(0);
    }

    private static String roundTrip(BookKeeper client, String what) throws Exception {
        LedgerHandle ledger = client.createLedger(3, 3, 2, DigestType.CRC32C, Checks.PASSWORD);
        CompletableFuture<Integer> first = new CompletableFuture<>();
        ledger.asyncAddEntry(
                Checks.payload(ledger.getId(), 0), (rc, handle, id, context) -> first.complete(rc), null);
        try { // a client that no bookie lets in turns to the next one, for ever
            int code = first.get(8, TimeUnit.SECONDS);
            if (code != BKException.Code.OK) {
                return "refused " + what + " " + code;
            }
        } catch (TimeoutException error) {
            return "refused " + what;
        }
        for (int entry = 1; entry < ENTRIES; entry++) {
            ledger.addEntry(Checks.payload(ledger.getId(), entry));
        }
        ledger.addEntry(Checks.payload(ledger.getId(), ENTRIES, LARGE));
        ledger.close();
        LedgerHandle again = client.openLedger(ledger.getId(), DigestType.CRC32C, Checks.PASSWORD);
        Checks.readAll(again, 0, ENTRIES - 1);
        byte[] large = again.readEntries(ENTRIES, ENTRIES).nextElement().getEntry();
        Checks.same(large.length, LARGE, "bytes of the large entry");
        return "stored " + what + " " + ledger.getId();
    }
}
