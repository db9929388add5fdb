// What Apache's benchmark of a bookie (BenchBookie) does, and one step more: adds without a digest and with a key of
// nothing but zeros, first to a ledger that was closed without entries, then to an id that no ledger has. Argument: host:port/path
// of the ledgers in ZooKeeper, host:port of the bookie, entries. Says "stored <entries> of <entries>" for each.

import io.netty.buffer.ByteBuf;
import io.netty.buffer.PooledByteBufAllocator;
import io.netty.buffer.Unpooled;
import io.netty.channel.EventLoopGroup;
import io.netty.channel.nio.NioEventLoopGroup;
import java.util.concurrent.Executors;
import java.util.concurrent.Semaphore;
import java.util.concurrent.atomic.AtomicInteger;
import org.apache.bookkeeper.client.BKException;
import org.apache.bookkeeper.client.BookKeeper;
import org.apache.bookkeeper.client.BookKeeper.DigestType;
import org.apache.bookkeeper.client.LedgerHandle;
import org.apache.bookkeeper.client.api.WriteFlag;
import org.apache.bookkeeper.common.util.OrderedExecutor;
import org.apache.bookkeeper.net.BookieSocketAddress;
import org.apache.bookkeeper.proto.BookieClient;
import org.apache.bookkeeper.proto.BookieClientImpl;
import org.apache.bookkeeper.proto.BookieProtocol;
import org.apache.bookkeeper.stats.NullStatsLogger;
import org.apache.bookkeeper.util.ByteBufList;

public final class Raw {
    private static final int SIZE = 1024;
    private static final int IN_FLIGHT = 200;

    public static void main(String[] arguments) throws Exception {
        BookieSocketAddress address = new BookieSocketAddress(arguments[1]);
        int entries = Integer.parseInt(arguments[2]);
        EventLoopGroup loop = new NioEventLoopGroup();
        OrderedExecutor executor = OrderedExecutor.newBuilder().name("raw").numThreads(1).build();
        BookieClient bookies = new BookieClientImpl(
                Checks.configuration(arguments[0]), loop, PooledByteBufAllocator.DEFAULT, executor,
                Executors.newSingleThreadScheduledExecutor(), NullStatsLogger.INSTANCE,
                BookieSocketAddress.LEGACY_BOOKIEID_RESOLVER);
        for (long ledger : new long[] {emptyLedger(arguments[0]), 1L << 50}) {
            AtomicInteger stored = new AtomicInteger();
            Semaphore slots = new Semaphore(IN_FLIGHT);
            for (long entry = 0; entry < entries; entry++) {
                slots.acquire();
                ByteBuf packet = Unpooled.buffer(SIZE);
                packet.writeLong(ledger);
                packet.writeLong(entry);
                packet.writerIndex(packet.capacity());
                bookies.addEntry(address.toBookieId(), ledger, new byte[20], entry, ByteBufList.get(packet),
                        (rc, id, number, who, context) -> {
                            stored.addAndGet(rc == BKException.Code.OK ? 1 : 0);
                            slots.release();
                        }, null, BookieProtocol.FLAG_NONE, false, WriteFlag.NONE);
            }
            slots.acquire(IN_FLIGHT);
            Checks.say("stored " + stored.get() + " of " + entries);
        }
        System.exit(0);
    }

    private static long emptyLedger(String zookeeper) throws Exception {
        try (BookKeeper client = Checks.client(zookeeper)) {
            LedgerHandle ledger = client.createLedger(1, 1, DigestType.CRC32, new byte[20]);
            ledger.close();
            return ledger.getId();
        }
    }
}
