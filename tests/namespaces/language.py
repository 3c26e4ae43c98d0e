"""Python itself: containers, functions, classes, modules."""

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
        "classes",
        """
        import abc, dataclasses, enum, functools, typing
        from dataclasses import dataclass, field

        class Shape(abc.ABC):
            count = 0
            @abc.abstractmethod
            def area(self): ...
            def __init__(self):
                type(self).count += 1
                Shape.last = self
            def __init_subclass__(cls, tag=None, **kw):
                super().__init_subclass__(**kw)
                registry[tag] = cls

        registry = {}

        class Square(Shape, tag="sq"):
            def __init__(self, s):
                super().__init__()
                self._s = s
            @property
            def side(self):
                return self._s
            @side.setter
            def side(self, v):
                self._s = v
            def area(self):
                return self.side**2
            @classmethod
            def unit(cls):
                return cls(1)
            @staticmethod
            def name():
                return "square"
            @functools.cached_property
            def slow(self):
                return self._s + 100

        sq = Square(3)
        sq.slow
        m = sq.area

        @dataclass(order=True)
        class Point:
            x: int
            y: int = 0
            tags: list = field(default_factory=list, compare=False)

        @dataclass(frozen=True, slots=True)
        class Frozen:
            v: int = 1

        pt, fz = Point(1, tags=["a"]), Frozen(4)

        class Color(enum.Enum):
            RED = 1
            CRIMSON = 1
            BLUE = "b"
            def shout(self):
                return self.name + "!"

        class Perm(enum.Flag):
            R = enum.auto()
            W = enum.auto()

        class Num(enum.IntEnum):
            ONE = 1

        class Planet(enum.Enum):
            EARTH = (5.9, 6.3)
            def __init__(self, mass, radius):
                self.mass, self.radius = mass, radius

        c, rw, earth = Color.RED, Perm.R | Perm.W, Planet.EARTH

        class NT(typing.NamedTuple):
            a: int
            b: str = "x"

        nt = NT(1)
        import collections

        CT = collections.namedtuple("CT", "p q")
        ct = CT(1, 2)
        T = typing.TypeVar("T")

        class Box(typing.Generic[T]):
            def __init__(self, v: T):
                self.v = v

        bx = Box[int](5)

        class TD(typing.TypedDict, total=False):
            k: int

        class Proto(typing.Protocol):
            def run(self) -> int: ...

        UserId = typing.NewType("UserId", int)

        class Meta(type):
            made = []
            def __new__(mcs, name, bases, ns, **kw):
                cls = super().__new__(mcs, name, bases, ns)
                mcs.made.append(name)
                return cls
            def __call__(cls, *args):
                obj = super().__call__(*args)
                obj.via = "meta"
                return obj

        class WithMeta(metaclass=Meta):
            pass

        wm = WithMeta()

        class Slots:
            __slots__ = ("a", "__b")
            def __init__(self):
                self.a, self.__b = 1, 2
            def b(self):
                return self.__b

        so = Slots()

        class NeedsArgs:
            def __new__(cls, x):
                self = super().__new__(cls)
                self.x = x
                return self

        na = NeedsArgs(3)

        class Err(Exception):
            def __init__(self, code, why):
                super().__init__(f"{code}: {why}")
                self.code = code

        try:
            try:
                1 / 0
            except ZeroDivisionError as zero:
                raise Err(5, "bad") from zero
        except Err as e:
            err = e

        class Desc:
            def __set_name__(self, owner, name):
                self.name = name
            def __get__(self, obj, owner):
                return self.name

        class UsesDesc:
            field = Desc()

        class Node:
            def __init__(self, up=None):
                self.up, self.kids = up, []

        root = Node()
        root.kids.append(Node(root))

        class Outer:
            class Inner:
                pass

        oi = Outer.Inner()

        class MyList(list):
            extra = 1

        ml = MyList([1, 2])
        ml.note = "n"

        class MyDict(dict):
            def __missing__(self, k):
                return k

        md = MyDict(a=1)
        """,
        """
        print(
            sq.area(),
            sq.side,
            sq.slow,
            Square.count,
            Shape.last is sq,
            registry["sq"] is Square,
            list(registry),
            m(),
            m.__self__ is sq,
            Square.unit().area(),
            Square.name(),
        )
        print(isinstance(sq, Shape), issubclass(Square, Shape))

        class Cube(Square, tag="cu"):
            pass

        print(registry["cu"] is Cube)
        try:
            Shape()
        except TypeError as e:
            print("abstract")
        print(
            pt, pt < Point(2), dataclasses.replace(pt, x=9), fz, hasattr(fz, "__dict__"), Point(5)
        )

        @dataclass
        class Sub(Point):
            z: int = 3

        print(Sub(1), dataclasses.fields(Point)[0].default is dataclasses.MISSING)
        try:
            fz.v = 2
        except Exception as e:
            print(type(e).__name__)
        print(
            c is Color.RED,
            Color(1) is c,
            Color.CRIMSON is c,
            Color["CRIMSON"] is c,
            c.shout(),
            list(Color),
        )
        print(rw, Perm.R in rw, Num.ONE + 1, earth.mass, Planet((5.9, 6.3)) is earth)
        print(
            nt, nt.b, NT(2), isinstance(nt, NT), ct, ct._asdict(), bx.v, type(bx) is Box, Box[str]
        )
        print(
            bx.__orig_class__,
            TD(k=1),
            TD.__annotations__,
            TD.__total__,
            UserId(3),
            UserId.__name__,
        )
        print(wm.via, Meta.made, type(WithMeta) is Meta, WithMeta().via)

        class Again(metaclass=Meta):
            pass

        print(Meta.made)
        print(so.a, so.b(), hasattr(so, "__dict__"), na.x, NeedsArgs(4).x)
        print(repr(err), err.code, type(err.__cause__).__name__, isinstance(err, Err))
        print(
            UsesDesc.field,
            UsesDesc().field,
            root.kids[0].up is root,
            type(oi) is Outer.Inner,
            Outer.Inner.__qualname__,
        )
        print(ml, ml.note, ml.extra, md["zz"], md)
        """,
        partly=("err",),
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
