"""One use of each library, against the Redis port of one node: `python probes.py NAME HOST PORT`.

It runs in an environment that has the libraries and not this store (libraries.py), and so imports nothing of it. A
probe raises an error if its use does not work. NAME is the name of a function.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

HOST, PORT = sys.argv[2:4] if len(sys.argv) > 3 else ("127.0.0.1", "6401")
URL = f"redis://{HOST}:{PORT}"
PREFIX = f"probe-{uuid4().hex[:8]}"


def redis_client() -> Any:
    import redis

    return redis.Redis(host=HOST, port=int(PORT))


# ── Django ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _django(backend: str) -> Any:
    from django.conf import settings

    cache = {"BACKEND": backend, "LOCATION": f"{URL}/0", "KEY_PREFIX": PREFIX}
    settings.configure(CACHES={"default": cache})
    from django.core.cache import caches

    return caches["default"]


def _use_django(cache: Any) -> None:
    cache.set("a", {"x": 1}, 60)
    assert cache.get("a") == {"x": 1}
    assert cache.add("a", 2) is False
    assert cache.add("n", 1) is True
    assert cache.incr("n") == 2
    assert cache.touch("a", 30) is True
    assert cache.get_many(["a", "n", "none"]) == {"a": {"x": 1}, "n": 2}
    assert cache.get_or_set("made", lambda: 7) == 7
    assert cache.delete("a") is True


def _set_many(cache: Any) -> None:
    assert cache.set_many({f"k{number}": number for number in range(20)}, 60) in ([], None)
    assert cache.get_many(["k1", "k19"]) == {"k1": 1, "k19": 19}
    cache.delete_many(["k1", "k2"])
    assert cache.get("k1") is None


def _clear(cache: Any) -> None:
    cache.set("a", 1)
    cache.clear()
    assert cache.get("a") is None


def django() -> None:
    _use_django(_django("django.core.cache.backends.redis.RedisCache"))


def django_set_many() -> None:
    _set_many(_django("django.core.cache.backends.redis.RedisCache"))


def django_clear() -> None:
    _clear(_django("django.core.cache.backends.redis.RedisCache"))


def django_redis() -> None:
    cache = _django("django_redis.cache.RedisCache")
    _use_django(cache)
    assert cache.ttl("n") is not None
    cache.set("p:1", 1)
    assert cache.delete_pattern("p:*") == 1
    with cache.lock("l", timeout=5):
        pass


def django_redis_set_many() -> None:
    _set_many(_django("django_redis.cache.RedisCache"))


def django_redis_clear() -> None:
    _clear(_django("django_redis.cache.RedisCache"))


# ── Flask ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def flask_caching() -> None:
    from flask import Flask
    from flask_caching import Cache

    app = Flask("probe")
    cache = Cache(app, config={"CACHE_TYPE": "RedisCache", "CACHE_REDIS_URL": f"{URL}/0", "CACHE_KEY_PREFIX": PREFIX})
    calls = []

    @cache.memoize(60)
    def squared(number: int) -> int:
        calls.append(number)
        return number * number

    with app.app_context():
        assert squared(3) == squared(3) == 9
        assert calls == [3]
        cache.set("a", 1, timeout=60)
        assert cache.add("a", 2) is False
        assert cache.get("a") == 1
        cache.clear()  # the keys of its prefix
        assert cache.get("a") is None
        assert squared(3) == 9
        assert calls == [3, 3]


def flask_caching_set_many() -> None:
    from flask import Flask
    from flask_caching import Cache

    app = Flask("probe")
    cache = Cache(app, config={"CACHE_TYPE": "RedisCache", "CACHE_REDIS_URL": f"{URL}/0", "CACHE_KEY_PREFIX": PREFIX})
    with app.app_context():
        cache.set_many({f"k{number}": number for number in range(20)}, 60)
        assert cache.get_many("k1", "k2") == [1, 2]
        cache.delete_many("k1", "k2")
        assert cache.get("k1") is None


def flask_session() -> None:
    from flask import Flask, session
    from flask_session import Session

    app = Flask("probe")
    app.config.update(SESSION_TYPE="redis", SESSION_REDIS=redis_client(), SESSION_KEY_PREFIX=PREFIX)
    Session(app)

    @app.get("/")
    def count() -> str:
        session["count"] = session.get("count", 0) + 1
        return str(session["count"])

    client = app.test_client()
    assert [client.get("/").text for _ in range(3)] == ["1", "2", "3"]


def _limited(strategy: str) -> None:
    from flask import Flask
    from flask_limiter import Limiter

    app = Flask("probe")
    Limiter(
        lambda: PREFIX,
        app=app,
        default_limits=["3 per minute"],
        storage_uri=URL,
        strategy=strategy,
        swallow_errors=False,
    )

    @app.get("/")
    def page() -> str:
        return "ok"

    client = app.test_client()
    codes = [client.get("/").status_code for _ in range(5)]
    assert codes == [200, 200, 200, 429, 429], codes


def flask_limiter() -> None:
    _limited("fixed-window")


# ── rate limits ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _limits(strategy: str) -> None:
    import limits
    import limits.strategies

    storage = limits.storage.storage_from_string(URL)
    limiter = getattr(limits.strategies, strategy)(storage)
    rate = limits.parse("5/minute")
    assert [limiter.hit(rate, PREFIX) for _ in range(7)] == [True] * 5 + [False] * 2
    assert limiter.test(rate, PREFIX) is False
    assert limiter.hit(rate, PREFIX, "other", cost=5) is True
    assert limiter.hit(rate, PREFIX, "other") is False
    limiter.clear(rate, PREFIX)
    assert limiter.hit(rate, PREFIX) is True


def limits_fixed_window() -> None:
    _limits("FixedWindowRateLimiter")


def limits_sliding_window() -> None:
    _limits("SlidingWindowCounterRateLimiter")


def limits_moving_window() -> None:
    _limits("MovingWindowRateLimiter")


# ── Celery and queues ─────────────────────────────────────────────────────────────────────────────────────────────────

TASKS = """
    import sys
    from celery import Celery

    app = Celery("tasks", broker={broker!r}, backend={backend!r})
    app.conf.broker_transport_options = {options!r}
    app.conf.result_expires = 60

    @app.task
    def add(a, b):
        return a + b

    @app.task
    def total(numbers):
        return sum(numbers)

    @app.task
    def fail():
        raise ValueError("no")
"""


def _celery(use: Callable[[Any], None]) -> None:
    """Run a worker whose broker is a folder and whose results go to Redis."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        options = {}
        for each in ("data_folder_in", "data_folder_out", "control_folder"):
            (folder / "queue").mkdir(exist_ok=True)
            options[each] = str(folder / "queue")
        (folder / "control").mkdir()
        options["control_folder"] = str(folder / "control")
        text = TASKS.format(broker="filesystem://", backend=f"{URL}/0", options=options)
        (folder / "tasks.py").write_text(textwrap.dedent(text))
        command = [sys.executable, "-m", "celery", "-A", "tasks", "worker", "-P", "solo", "--without-gossip"]
        command += ["--without-mingle", "--without-heartbeat", "-l", "error"]
        worker = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL)
        try:
            sys.path.insert(0, name)
            import tasks

            use(tasks)
        finally:
            worker.terminate()
            worker.wait()


def celery_results() -> None:
    def use(tasks: Any) -> None:
        found = [tasks.add.delay(number, 1) for number in range(10)]
        assert [each.get(timeout=60) for each in found] == list(range(1, 11))
        failed = tasks.fail.delay()
        try:
            failed.get(timeout=60)
        except ValueError:
            assert failed.state == "FAILURE"
        else:
            raise AssertionError("expected the error of the task")
        found[0].forget()

    _celery(use)


def celery_groups() -> None:
    def use(tasks: Any) -> None:
        from celery import group

        assert group(tasks.add.s(number, 1) for number in range(5))().get(timeout=60) == [1, 2, 3, 4, 5]

    _celery(use)


def celery_chords() -> None:
    def use(tasks: Any) -> None:
        from celery import chord

        assert chord(tasks.add.s(number, 1) for number in range(5))(tasks.total.s()).get(timeout=30) == 15

    _celery(use)


def celery_broker() -> None:
    from celery import Celery

    app = Celery("probe", broker=f"{URL}/0")
    app.conf.broker_transport_options = {"max_retries": 1}
    app.send_task("nothing", retry=False)


def rq() -> None:
    from rq import Queue

    Queue(connection=redis_client()).enqueue(time.sleep, 0)


def huey() -> None:
    from huey import RedisHuey

    app = RedisHuey(PREFIX, url=URL)
    app.task()(time.sleep)(0)


def dramatiq() -> None:
    import dramatiq as library
    from dramatiq.brokers.redis import RedisBroker

    library.set_broker(RedisBroker(url=URL))
    library.actor(time.sleep).send(0)


# ── caches and locks ──────────────────────────────────────────────────────────────────────────────────────────────────


def _aiocache(use: Callable[[Any], Any]) -> None:
    from aiocache import RedisCache

    async def main() -> None:
        async with RedisCache(endpoint=HOST, port=int(PORT), namespace=PREFIX) as cache:
            await use(cache)

    asyncio.run(main())


def aiocache() -> None:
    async def use(cache: Any) -> None:
        from aiocache.lock import RedLock

        await cache.set("a", "1", ttl=60)
        assert await cache.get("a") == "1"
        assert await cache.multi_get(["a", "none"]) == ["1", None]
        assert await cache.increment("n", 2) == 2
        assert await cache.exists("a")
        async with RedLock(cache, "a", lease=5):
            pass
        assert await cache.clear(namespace=PREFIX)
        assert await cache.get("a") is None

    _aiocache(use)


def aiocache_multi_set() -> None:
    async def use(cache: Any) -> None:
        await cache.multi_set([(f"k{number}", str(number)) for number in range(20)], ttl=60)
        assert await cache.multi_get(["k1", "k19"]) == ["1", "19"]

    _aiocache(use)


def aiocache_optimistic_lock() -> None:
    async def use(cache: Any) -> None:
        from aiocache.lock import OptimisticLock, OptimisticLockError

        await cache.set("a", "1")
        async with OptimisticLock(cache, "a") as lock:
            await lock.cas("2")
        assert await cache.get("a") == "2"
        async with OptimisticLock(cache, "a") as lock:
            await cache.set("a", "3")
            try:
                await lock.cas("4", ttl=60)
            except OptimisticLockError:
                return
        raise AssertionError("expected OptimisticLockError")

    _aiocache(use)


def dogpile_cache() -> None:
    from dogpile.cache import make_region

    arguments = {"host": HOST, "port": int(PORT), "distributed_lock": True, "thread_local_lock": False}
    region = make_region(key_mangler=lambda key: f"{PREFIX}:{key}")
    region.configure("dogpile.cache.redis", expiration_time=60, arguments=arguments)
    assert region.get_or_create("a", lambda: 42) == 42
    assert region.get_or_create("a", lambda: 43) == 42
    region.set_multi({"x": 1, "y": 2})
    assert region.get_multi(["x", "y"]) == [1, 2]
    region.delete("a")


def redis_py_lock() -> None:
    client = redis_client()
    lock = client.lock(PREFIX, timeout=10)
    assert lock.acquire(blocking=False)
    assert client.lock(PREFIX, timeout=10).acquire(blocking=False) is False
    assert lock.extend(5)
    assert lock.reacquire()
    lock.release()
    assert client.lock(PREFIX, timeout=10).acquire(blocking=False)


def redis_py_pubsub() -> None:
    client = redis_client()
    found = client.pubsub()
    found.subscribe(PREFIX)
    found.psubscribe(f"{PREFIX}*")
    client.publish(PREFIX, "hello")
    seen = []
    while len(seen) < 4:
        if (message := found.get_message(timeout=5)) is not None:
            seen.append(message["type"])
    assert seen == ["subscribe", "psubscribe", "message", "pmessage"]


def redlock_py() -> None:
    import redlock

    locks = redlock.Redlock([{"host": HOST, "port": int(PORT)}], retry_count=1)
    lock = locks.lock(PREFIX, 5000)
    assert lock
    assert not locks.lock(PREFIX, 5000)
    locks.unlock(lock)
    assert locks.lock(PREFIX, 5000)


def pottery_redlock() -> None:
    from pottery import Redlock

    lock = Redlock(key=PREFIX, masters={redis_client()}, auto_release_time=10)
    assert lock.acquire(blocking=False)
    assert lock.locked() > 0
    lock.extend()
    lock.release()
    assert not lock.locked()


def python_redis_lock() -> None:
    import redis_lock

    with redis_lock.Lock(redis_client(), PREFIX, expire=5):
        pass


# ── messages ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def channels_redis_pubsub() -> None:
    from channels_redis.pubsub import RedisPubSubChannelLayer

    async def main() -> None:
        here, there = (RedisPubSubChannelLayer(hosts=[URL], prefix=PREFIX) for _ in range(2))
        mine = await here.new_channel()
        await here.group_add("room", mine)
        await there.group_send("room", {"type": "chat", "text": "hello"})
        async with asyncio.timeout(30):
            assert await here.receive(mine) == {"type": "chat", "text": "hello"}
        await here.flush()
        await there.flush()

    asyncio.run(main())


def channels_redis_core() -> None:
    from channels_redis.core import RedisChannelLayer

    async def main() -> None:
        layer = RedisChannelLayer(hosts=[URL], prefix=PREFIX)
        await layer.send("a", {"type": "chat"})

    asyncio.run(main())


def python_socketio() -> None:
    import socketio

    async def main() -> None:
        heard: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        here, there = (socketio.AsyncRedisManager(URL, channel=PREFIX) for _ in range(2))
        server = socketio.AsyncServer(client_manager=here, async_mode="asgi")
        here.set_server(server)

        async def emitted(message: Any) -> None:
            if not heard.done():
                heard.set_result(message["data"])

        here._handle_emit = emitted
        here.initialize()
        socketio.AsyncServer(client_manager=there, async_mode="asgi")
        async with asyncio.timeout(30):
            while not heard.done():
                await there._publish({"method": "emit", "event": "chat", "data": "hello", "host_id": "other"})
                await asyncio.wait([heard], timeout=0.2)
        assert heard.result() == "hello"

    asyncio.run(main())


if __name__ == "__main__":
    globals()[sys.argv[1]]()
    sys.stdout.flush()
    import os

    os._exit(0)  # some libraries leave threads that would keep the process
