import java.util.List;
import org.apache.bookkeeper.client.BookKeeper;
import org.apache.bookkeeper.conf.ClientConfiguration;
import org.apache.pulsar.bookie.rackawareness.BookieRackAffinityMapping;
import org.apache.pulsar.metadata.api.MetadataStoreConfig;
import org.apache.pulsar.metadata.api.extended.MetadataStoreExtended;

/** Says which rack Pulsar's own mapping gives to each host: Racks LEDGERS PULSAR HOST... */
public class Racks {
    public static void main(String[] words) throws Exception {
        ClientConfiguration conf = new ClientConfiguration();
        conf.setMetadataServiceUri("zk+hierarchical://" + words[0]);
        try (BookKeeper client = new BookKeeper(conf);
                MetadataStoreExtended store =
                        MetadataStoreExtended.create("zk:" + words[1], MetadataStoreConfig.builder().build())) {
            ClientConfiguration ofMapping = new ClientConfiguration();
            ofMapping.setProperty(BookieRackAffinityMapping.METADATA_STORE_INSTANCE, store);
            BookieRackAffinityMapping mapping = new BookieRackAffinityMapping();
            mapping.setBookieAddressResolver(client.getBookieAddressResolver());
            mapping.setConf(ofMapping);
            for (String host : List.of(words).subList(2, words.length)) {
                System.out.println("rack " + host + " " + mapping.resolve(List.of(host)).get(0));
            }
        }
        System.exit(0);
    }
}
