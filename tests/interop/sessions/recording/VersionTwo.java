// Says what Apache's client and bookie write in version 2 of the wire: one frame per line, as tests/proto/golden wants them.

package org.apache.bookkeeper.proto;

import com.google.protobuf.ByteString;
import com.google.protobuf.ExtensionRegistry;
import io.netty.buffer.ByteBuf;
import io.netty.buffer.ByteBufUtil;
import io.netty.buffer.Unpooled;
import io.netty.buffer.UnpooledByteBufAllocator;
import org.apache.bookkeeper.proto.BookieProtoEncoding.RequestEnDeCoderPreV3;
import org.apache.bookkeeper.proto.BookieProtoEncoding.ResponseEnDeCoderPreV3;
import org.apache.bookkeeper.proto.DataFormats.LedgerMetadataFormat.DigestType;
import org.apache.bookkeeper.proto.checksum.DigestManager;
import org.apache.bookkeeper.util.ByteBufList;

public final class VersionTwo {
    private static final UnpooledByteBufAllocator MEMORY = UnpooledByteBufAllocator.DEFAULT;
    private static final byte TWO = BookieProtocol.CURRENT_PROTOCOL_VERSION;

    private static void say(String name, Object frame) {
        ByteBuf bytes = frame instanceof ByteBufList ? ByteBufList.coalesce((ByteBufList) frame) : (ByteBuf) frame;
        System.out.println(name + ": " + ByteBufUtil.hexDump(bytes.skipBytes(4))); // without the length in front
    }

    private static void add(String name, byte[] key, int flags) throws Exception {
        DigestManager digest = DigestManager.instantiate(7, "secret".getBytes(), DigestType.CRC32C, MEMORY, true);
        say(name, digest.computeDigestAndPackageForSending(3, 2, 20, Unpooled.wrappedBuffer("hello".getBytes()), key, flags));
    }

    public static void main(String[] arguments) throws Exception {
        byte[] key = DigestManager.generateMasterKey("secret".getBytes());
        short plain = BookieProtocol.FLAG_NONE;
        short urgent = BookieProtocol.FLAG_DO_FENCING | BookieProtocol.FLAG_HIGH_PRIORITY;
        add("add", key, plain);
        add("recovery add", key, BookieProtocol.FLAG_RECOVERY_ADD | BookieProtocol.FLAG_HIGH_PRIORITY);
        BookkeeperProtocol.AuthMessage auth = BookkeeperProtocol.AuthMessage.newBuilder()
                .setAuthPluginName("AuthDisabledPlugin").setPayload(ByteString.EMPTY).build();
        RequestEnDeCoderPreV3 requests = new RequestEnDeCoderPreV3(ExtensionRegistry.newInstance());
        Object[][] asked = {
            {"read", BookieProtocol.ReadRequest.create(TWO, 7, 3, plain, null)},
            {"read the last", BookieProtocol.ReadRequest.create(TWO, 7, -1, plain, null)},
            {"fence and read the last", BookieProtocol.ReadRequest.create(TWO, 7, -1, urgent, key)},
            {"batched read", BookieProtocol.BatchedReadRequest.create(TWO, 7, 3, plain, null, 99, 30, 4096)},
            {"batched read that fences", BookieProtocol.BatchedReadRequest.create(TWO, 7, 3, urgent, key, 99, 30, 4096)},
            {"auth", new BookieProtocol.AuthRequest(TWO, auth)},
        };
        for (Object[] each : asked) {
            say((String) each[0], requests.encode(each[1], MEMORY));
        }
        ResponseEnDeCoderPreV3 responses = new ResponseEnDeCoderPreV3(ExtensionRegistry.newInstance());
        ByteBuf packet = Unpooled.wrappedBuffer("packet".getBytes());
        ByteBufList two = ByteBufList.get(Unpooled.wrappedBuffer("first".getBytes()), Unpooled.wrappedBuffer("second".getBytes()));
        Object[][] answered = {
            {"stored", BookieProtocol.AddResponse.create(TWO, BookieProtocol.EOK, 7, 3)},
            {"fenced", BookieProtocol.AddResponse.create(TWO, BookieProtocol.EFENCED, 7, 3)},
            {"read-only", BookieProtocol.AddResponse.create(TWO, BookieProtocol.EREADONLY, 7, 3)},
            {"entry", new BookieProtocol.ReadResponse(TWO, BookieProtocol.EOK, 7, 3, packet)},
            {"no entry", new BookieProtocol.ReadResponse(TWO, BookieProtocol.ENOENTRY, 7, 3)},
            {"no ledger", new BookieProtocol.ReadResponse(TWO, BookieProtocol.ENOLEDGER, 7, -1)},
            {"entries", new BookieProtocol.BatchedReadResponse(TWO, BookieProtocol.EOK, 7, 3, 99, two)},
            {"no entries", new BookieProtocol.BatchedReadResponse(TWO, BookieProtocol.ENOENTRY, 7, 3, 99)},
            {"no authentication", new BookieProtocol.AuthResponse(TWO, auth)},
        };
        for (Object[] each : answered) {
            say((String) each[0], responses.encode(each[1], MEMORY));
        }
    }
}
