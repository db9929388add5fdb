// One use of each library of Node.js, against the Redis port of one node: `node probes.cjs NAME HOST PORT`.
const assert = require("node:assert");

const [name, host, port] = [process.argv[2], process.argv[3], Number(process.argv[4])];
const prefix = `probe-${Math.random().toString(16).slice(2, 10)}`;

const probes = {
  async node_ioredis() {
    const Redis = require("ioredis");
    const [client, listener] = [new Redis({ host, port }), new Redis({ host, port })];
    await client.set(`${prefix}:a`, "1", "EX", 60);
    assert.equal(await client.incr(`${prefix}:a`), 2);
    const replies = await client.pipeline().get(`${prefix}:a`).ttl(`${prefix}:a`).exec();
    assert.equal(replies[0][1], "2");
    const together = await client.multi().set(`{${prefix}}1`, "x").get(`{${prefix}}1`).exec();
    assert.deepEqual(together, [[null, "OK"], [null, "x"]]);
    let keys = [];
    for await (const found of client.scanStream({ match: `${prefix}:*` })) keys = keys.concat(found);
    assert.deepEqual(keys, [`${prefix}:a`]);
    const heard = new Promise((resolve) => listener.on("pmessage", (...words) => resolve(words)));
    await listener.psubscribe(`${prefix}*`);
    await client.publish(`${prefix}.news`, "hello");
    assert.deepEqual(await heard, [`${prefix}*`, `${prefix}.news`, "hello"]);
  },

  async node_redis() {
    const { createClient } = require("redis");
    const client = await createClient({ url: `redis://${host}:${port}` }).connect();
    await client.set(`${prefix}:a`, "1", { EX: 60 });
    assert.equal(await client.incr(`${prefix}:a`), 2);
    assert.deepEqual(await client.multi().set(`{${prefix}}1`, "x").get(`{${prefix}}1`).exec(), ["OK", "x"]);
    let keys = [];
    for await (const found of client.scanIterator({ MATCH: `${prefix}:*` })) keys = keys.concat(found);
    assert.deepEqual(keys, [`${prefix}:a`]);
    const listener = await client.duplicate().connect();
    const heard = new Promise((resolve) => listener.subscribe(prefix, (message) => resolve(message)).then(() =>
      client.publish(prefix, "hello")));
    assert.equal(await heard, "hello");
  },

  async node_redlock() {
    const Redis = require("ioredis");
    const Redlock = require("redlock");
    const locks = new Redlock([new Redis({ host, port })], { retryCount: 0 });
    const lock = await locks.lock(prefix, 10000);
    await assert.rejects(locks.lock(prefix, 10000));
    const longer = await lock.extend(20000);
    await longer.unlock();
    await (await locks.lock(prefix, 10000)).unlock();
  },

  async node_bullmq() {
    const { Queue } = require("bullmq");
    const queue = new Queue(prefix, { connection: { host, port, maxRetriesPerRequest: 1 } });
    await queue.add("job", { a: 1 });
  },
};

probes[name]().then(
  () => process.exit(0),
  (error) => {
    console.error(error);
    process.exit(1);
  },
);
