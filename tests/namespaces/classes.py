"""Classes that cells define, and their objects."""

from __future__ import annotations

from tests.namespaces import Notebook

NOTEBOOKS = [
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
        "classes-that-resist",
        """
        import collections, dataclasses, enum, functools, threading
        # %%
        class Counted(dict):
            def __init__(self, name):
                super().__init__()
                self.name, self.log = name, []

            def __setitem__(self, key, value):
                super().__setitem__(key, value)
                self.log.append(key)

        counted = Counted("c")
        counted["a"] = 1

        class Wrapper:
            def __init__(self, inner):
                self.inner = inner

            def __getattr__(self, name):
                return getattr(self.inner, name)

        wrapper = Wrapper([3, 1])

        class Pair(tuple):
            def __new__(cls, a, b):
                return super().__new__(cls, (a, b))

        class Tagged(int):
            def __new__(cls, value, tag):
                made = super().__new__(cls, value)
                made.tag = tag
                return made

        class Ring(collections.deque):
            def __init__(self, size):
                super().__init__(maxlen=size)

            def append(self, item):
                super().append((item, len(self)))

        class Bag(set):
            def __init__(self, *, first):
                super().__init__([first])

        class Lazy(collections.OrderedDict):
            def __init__(self, why):
                super().__init__(z=1, a=2)
                self.why = why

        pair, tagged, ring, bag, lazy = Pair(1, 2), Tagged(5, "t"), Ring(2), Bag(first=1), Lazy("w")
        ring.append("x")

        class Guarded:
            def __init__(self):
                self.held = threading.Lock()
                self.held.acquire()
                self.data = pair

            def __getstate__(self):
                return {"data": self.data}

            def __setstate__(self, state):
                vars(self).update(state, held=threading.Lock(), by=helper())

        def helper():
            return SCALE * 2

        SCALE = 4
        guarded = Guarded()

        class Silent:
            def __bool__(self):
                raise RuntimeError

            __eq__ = __len__ = __iter__ = __bool__
            __hash__ = object.__hash__

        silent = {"s": [Silent()]}

        @dataclasses.dataclass(frozen=True)
        class Key:
            name: str
            others: list = dataclasses.field(default_factory=list, compare=False)

        key = Key("k")
        table = {key: "v"}
        key.others.append([key])

        class Scaled(enum.Enum):
            A = 1

            def __new__(cls, value):
                made = object.__new__(cls)
                made._value_, made.extra = value * 10, "e"
                return made

        scaled = Scaled.A
        group = ExceptionGroup("g", [ValueError(1), FileNotFoundError(2, "no", "f")])
        """,
        """
        counted["b"] = 2
        print(counted, counted.log, counted.name, wrapper.index(1), pair, type(pair) is Pair)
        print(Pair(3, 4), tagged + 1, tagged.tag, list(ring), ring.maxlen)
        print(bag, lazy, lazy.why, list(lazy))
        ring.append("y")
        print(list(ring), guarded.data is pair, type(silent["s"][0]) is Silent)
        print(getattr(guarded, "by", 8), guarded.held.acquire(False) in (True, False))
        print(table[Key("k")], key.others[0][0] is key, scaled is Scaled(10), scaled.extra)
        print(group.exceptions[1].filename, group.exceptions[0].args)
        """,
    ),
]
