import java.io.FileInputStream;
import java.io.InputStream;
import java.lang.reflect.Field;
import java.util.Properties;
import org.apache.pulsar.broker.ServiceConfiguration;
import org.apache.pulsar.common.configuration.PulsarConfigurationLoader;

/** Says what a broker takes each setting of a broker.conf for: Conf FILE. Fails for one that it does not have. */
public class Conf {
    public static void main(String[] words) throws Exception {
        Properties said = new Properties();
        try (InputStream file = new FileInputStream(words[0])) {
            said.load(file);
        }
        ServiceConfiguration conf = PulsarConfigurationLoader.create(words[0], ServiceConfiguration.class);
        for (String name : said.stringPropertyNames()) {
            Field field = ServiceConfiguration.class.getDeclaredField(name);
            field.setAccessible(true);
            System.out.println("setting " + name + " " + field.get(conf));
        }
    }
}
