"""The notebook of the recorded checkpoint: one cell creates everything, one prints it."""

CREATE = """
import collections, dataclasses, datetime, enum, functools, logging, random, re, threading
import numpy as np
import torch

number, text, nothing = 41, "grüße", None
shared = [1, 2, 3]
aliases = {"one": shared, "other": shared}
ordered = collections.OrderedDict(b=1, a=2)
when = datetime.datetime(2026, 1, 2, 3, 4, 5)
pattern = re.compile(r"a+")
log = logging.getLogger("wire")
lock = threading.Lock()

class Colour(enum.Enum):
    RED = 1

@dataclasses.dataclass
class Point:
    x: float
    y: float

    def length(self):
        return (self.x**2 + self.y**2) ** 0.5

point = Point(3.0, 4.0)

def counter():
    count = 0
    def count_up():
        nonlocal count
        count += number
        return count
    return count_up

count_up = counter()
count_up()
twice = functools.partial(max, 7)

@functools.lru_cache(maxsize=4)
def square(value):
    return value * value

array = np.arange(12.0).reshape(3, 4)
column = array[:, 1]
np.random.seed(5)
random.seed(6)

torch.manual_seed(7)
model = torch.nn.Sequential(
    torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)
).to("cuda")
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

def train(steps):
    for _ in range(steps):
        batch = torch.randn(32, 8, device="cuda")
        loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()

train(3)
table = torch.arange(6, device="cuda").reshape(2, 3)
row = table[1]
half = torch.full((3,), 0.5, dtype=torch.bfloat16, device="cuda")
"""

#: Prints the same before and after a restore: the values, and also which objects are shared, and
#: which random numbers come next.
TELL = """
aliases["one"].append(4)
array[0, 1] = 100.0
row += 10
print(number, text, nothing, aliases["other"], list(ordered), when.isoformat())
print(pattern.match("aab").group(), log.name, lock.locked(), Colour.RED, point, point.length())
print(count_up(), twice(3), square(9), column.tolist(), table.tolist(), half.tolist())
print(random.random(), np.random.rand(), torch.rand(1).item(), torch.rand(1, device="cuda").item())
print(Colour.RED is Colour(1), isinstance(point, Point), model[0].weight.is_cuda)
# Other processors round otherwise.
print(f"{train(3):.4g}", int(optimizer.state[model[0].weight]["step"]))
"""
