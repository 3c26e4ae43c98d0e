"""Python itself: containers, functions, modules."""

from __future__ import annotations

from tests.namespaces import Notebook

NOTEBOOKS = [
    Notebook(
        "numbers-and-containers",
        """
        import collections, decimal, fractions, datetime, uuid, pathlib, re, ipaddress

        a = [1, 2.5, "x", b"y", None, True, 1j, ...]
        d = {"a": a, (1, 2): {3, 4}, "self": None}
        d["self"] = d
        q = collections.deque([1, 2], maxlen=3)
        dd = collections.defaultdict(list, {"x": a})
        od = collections.OrderedDict(b=1, a=2)
        cn = collections.Counter("hello")
        cm = collections.ChainMap({"x": 1}, d)
        dec, fr = decimal.Decimal("1.10"), fractions.Fraction(1, 3)
        when = datetime.datetime(2024, 1, 2, tzinfo=datetime.timezone.utc)
        p, rx, u = pathlib.Path("a/b"), re.compile("a+", re.I), uuid.UUID(int=5)
        big, rng, sl = bytearray(b"z" * 100_000), range(3, 9, 2), slice(1, None)
        half = iter([1, 2, 3])
        next(half)
        z = zip("abc", range(9))
        next(z)
        en = enumerate(a)
        next(en)
        keys = d.keys()
        ip = ipaddress.ip_address("10.0.0.1")
        """,
        """
        a.append("new")
        d["later"] = 1
        q.append(9)
        dd["y"].append(1)
        print(d["a"] is a, d["self"] is d, dd["x"] is a, a, q, dd["y"], od, cn, dec, fr, when)
        print(
            p, rx.findall("bAa"), u, len(big), big[-1], rng, sl, list(half), list(z), next(en)[0]
        )
        print("later" in keys, cm["later"], cm.maps[1] is d, ip)
        """,
    ),
    Notebook(
        "functions",
        """
        import functools, operator

        scale = 3

        def f(x, *, k=[]):
            "doc"
            k.append(x)
            return x * scale, k

        f.note = "n"
        fact = lambda n: 1 if n < 2 else n * fact(n - 1)

        def make():
            n = 0
            def up():
                nonlocal n
                n += 1
                return n
            def look():
                return n
            return up, look

        up, look = make()
        up()

        def deep(n):
            def inner(k):
                return 0 if k == 0 else 1 + inner(k - 1)
            return inner(n)

        def rec():
            def g(k):
                return k if k < 1 else g(k - 1)
            return g

        g = rec()
        part = functools.partial(f, k=[7])

        @functools.lru_cache(maxsize=10)
        def slow(x):
            global calls
            calls = calls + 1
            return x + scale

        calls = 0
        slow(1)

        def wraps(fn):
            @functools.wraps(fn)
            def wrapper(*args):
                log.append(fn.__name__)
                return fn(*args)
            return wrapper

        log = []

        @wraps
        def wrapped(x):
            return -x

        def setter(v):
            global scale
            scale = v

        @functools.singledispatch
        def kind(x):
            return "object"

        @kind.register
        def _(x: int):
            return "int"

        get, add = operator.itemgetter(1), operator.add
        meth = log.append

        async def co():
            return 1

        def gen():
            yield scale
        """,
        """
        setter(5)
        slow.cache_clear()
        print(f(2), f(3), f.__doc__, f.note, fact(5), f.__globals__ is globals())
        print(up(), look(), deep(3), g(4), part(1), slow(1), slow(1), slow.cache_info().maxsize)
        print(wrapped(4), log, wrapped.__wrapped__(1), kind(1), kind("a"), get([1, 2]), add(1, 2))
        meth("x")
        print(log, list(gen()), scale, co.__name__, up.__closure__[0] is look.__closure__[0])
        """,
        partly=("slow",),
    ),
    Notebook(
        "aliases-across-variables",
        """
        shared = [1]
        a, b = {"s": shared}, (shared, "x")

        class C:
            store = shared

        def f(x=shared):
            return x

        c1 = C()
        c2 = c1
        cyc = []
        cyc.append(cyc)
        tup = (a, b, c1)
        g = globals()
        bound = c1.__init__
        """,
        """
        shared.append(2)
        print(
            a, b, C.store, f(), c1 is c2, cyc[0] is cyc, tup[0] is a, tup[2] is c1, g is globals()
        )
        """,
    ),
    Notebook(
        "modules",
        """
        import math, os.path as osp, json, collections.abc, sys, types
        from math import sin, pi

        import __main__ as me
        made = types.ModuleType("made")
        made.x = [1]
        x = made.x
        env, argv, out = os_environ = __import__("os").environ, sys.argv, sys.stdout

        def uses():
            return math.floor(osp.sep and pi), json.dumps([1])
        """,
        """
        import os

        print(
            math is sys.modules["math"],
            osp is os.path,
            sin(0),
            made.x is x,
            env is os.environ,
            uses(),
        )
        print(me.__dict__ is globals(), type(made).__name__, made.__name__)
        """,
    ),
    Notebook(
        "underscores",
        """
        _private = 1
        for _ in range(3):
            pass
        __dunderish = 2
        x: int = 5
        del x
        """,
        """
        print(_private, __dunderish, _)
        """,
    ),
]
