"""The rows of the commands that Redis has and this store does not support. A client that sends one gets the reason.
Decides only."""

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
    "bitmaps": "BITCOUNT BITFIELD BITFIELD_RO BITOP BITPOS GETBIT SETBIT",
    "geospatial indexes": "GEOADD GEODIST GEOHASH GEOPOS GEORADIUS GEORADIUS_RO GEORADIUSBYMEMBER "
    "GEORADIUSBYMEMBER_RO GEOSEARCH GEOSEARCHSTORE",
    "vectors": "VADD VCARD VDIM VEMB VGETATTR VINFO VISMEMBER VLINKS VRANDMEMBER VREM VSETATTR VSIM",
    "hyperloglogs": "PFADD PFCOUNT PFDEBUG PFMERGE PFSELFTEST",
}
_ELSEWHERE = {
    "every acknowledged write is on disk already": "BGREWRITEAOF BGSAVE LASTSAVE SAVE WAITAOF",
    "the log replicates writes and leaders are elected; see `kvstore status`": "FAILOVER PSYNC REPLCONF "
    "REPLICAOF SLAVEOF SYNC",
    "use `kvstore snapshot` and `kvstore load-tree` to copy data between stores": "DUMP MIGRATE RESTORE RESTORE-ASKING",
    "there is only one database": "MOVE SWAPDB",
    "commands of other clients are not shown; use `kvstore watch` for changes and `kvstore node slow-log`": "MONITOR",
    "use `kvstore node` to manage nodes": "DEBUG SHUTDOWN",
    "no node replies ASK, because a moving range is always served by one node": "ASKING",
    "use PUBLISH and SUBSCRIBE, which reach all nodes": "SPUBLISH SSUBSCRIBE SUNSUBSCRIBE",
    "compare the values in the client": "DELEX DIGEST LCS",
    "use SET with an expiry inside MULTI": "MSETEX",
    "no drawings here": "LOLWUT",
}
UNSUPPORTED = {
    name.encode(): Unsupported(name, reason)
    for reason, names in (
        *((f"{kind} are not supported, values are strings", names) for kind, names in _KINDS.items()),
        *_ELSEWHERE.items(),
    )
    for name in names.split()
}
"""The rows, by name."""
