"""The rows of the commands that Redis has and this store has not. A client that sends one gets its reason. Decides
only."""

from __future__ import annotations

from kvstore.server.redis.commands.row import Unsupported

_KINDS = {
    "lists": "BLMOVE BLMPOP BLPOP BRPOP BRPOPLPUSH LINDEX LINSERT LLEN LMOVE LMPOP LPOP LPOS LPUSH LPUSHX LRANGE LREM "
    "LSET LTRIM RPOP RPOPLPUSH RPUSH RPUSHX SORT SORT_RO",
    "sets": "SADD SCARD SDIFF SDIFFSTORE SINTER SINTERCARD SINTERSTORE SISMEMBER SMEMBERS SMISMEMBER SMOVE SPOP "
    "SRANDMEMBER SREM SSCAN SUNION SUNIONSTORE",
    "sorted sets": "BZMPOP BZPOPMAX BZPOPMIN ZADD ZCARD ZCOUNT ZDIFF ZDIFFSTORE ZINCRBY ZINTER ZINTERCARD ZINTERSTORE "
    "ZLEXCOUNT ZMPOP ZMSCORE ZPOPMAX ZPOPMIN ZRANDMEMBER ZRANGE ZRANGEBYLEX ZRANGEBYSCORE ZRANGESTORE ZRANK ZREM "
    "ZREMRANGEBYLEX ZREMRANGEBYRANK ZREMRANGEBYSCORE ZREVRANGE ZREVRANGEBYLEX ZREVRANGEBYSCORE ZREVRANK ZSCAN ZSCORE "
    "ZUNION ZUNIONSTORE",
    "hashes": "HDEL HEXISTS HEXPIRE HEXPIREAT HEXPIRETIME HGET HGETALL HGETDEL HGETEX HINCRBY HINCRBYFLOAT HKEYS "
    "HLEN HMGET HMSET HPERSIST HPEXPIRE HPEXPIREAT HPEXPIRETIME HPTTL HRANDFIELD HSCAN HSET HSETEX "
    "HSETNX HSTRLEN HTTL HVALS",
    "streams": "XACK XACKDEL XADD XAUTOCLAIM XCFGSET XCLAIM XDEL XDELEX XGROUP XINFO XLEN XPENDING XRANGE XREAD "
    "XREADGROUP XREVRANGE XSETID XTRIM",
    "scripts and functions": "EVAL_RO EVALSHA_RO FCALL FCALL_RO FUNCTION",
    "channels": "PSUBSCRIBE PUBLISH PUBSUB PUNSUBSCRIBE SPUBLISH SSUBSCRIBE SUBSCRIBE SUNSUBSCRIBE UNSUBSCRIBE",
    "bitmaps": "BITCOUNT BITFIELD BITFIELD_RO BITOP BITPOS GETBIT SETBIT",
    "places": "GEOADD GEODIST GEOHASH GEOPOS GEORADIUS GEORADIUS_RO GEORADIUSBYMEMBER GEORADIUSBYMEMBER_RO GEOSEARCH "
    "GEOSEARCHSTORE",
    "vectors": "VADD VCARD VDIM VEMB VGETATTR VINFO VISMEMBER VLINKS VRANDMEMBER VREM VSETATTR VSIM",
    "hyperloglogs": "PFADD PFCOUNT PFDEBUG PFMERGE PFSELFTEST",
}
_ELSEWHERE = {
    "what is answered is on disk already": "BGREWRITEAOF BGSAVE LASTSAVE SAVE WAITAOF",
    "copies are made by the log, and leaders are elected: `kvstore status` shows both": "FAILOVER PSYNC REPLCONF "
    "REPLICAOF SLAVEOF SYNC",
    "`kvstore snapshot` and `kvstore load-tree` carry data from store to store": "DUMP MIGRATE RESTORE RESTORE-ASKING",
    "there is one database": "MOVE SWAPDB",
    "nobody is shown what others do: `kvstore watch` shows changes, `kvstore node slow-log` what took long": "MONITOR",
    "`kvstore node` looks after nodes": "DEBUG SHUTDOWN",
    "nobody is sent from node to node": "ASKING",
    "compare the values where you are": "DELEX DIGEST LCS",
    "SET takes an expiry, and MULTI makes several one": "MSETEX",
    "nothing is drawn here": "LOLWUT",
}
UNSUPPORTED = {
    name.encode(): Unsupported(name, reason)
    for reason, names in (
        *((f"{kind} are not kept here, values are strings", names) for kind, names in _KINDS.items()),
        *_ELSEWHERE.items(),
    )
    for name in names.split()
}
"""The rows, by name."""
