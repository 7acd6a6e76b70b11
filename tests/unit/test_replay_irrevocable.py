"""A forward that changes what nobody can put back is not replayed; one that leaves it alone is."""

import collections
import itertools
import queue
import sqlite3
import threading
import weakref

import pytest
import torch.nn.functional as F
from replaykit import Solo, data
from torch import nn
from torch.utils.data import DataLoader


def counting():
    number = 0
    while True:
        yield number
        number += 1


def used_up():
    made = iter([1])
    next(made)
    return made


class Bar(queue.Queue):
    """Stands for an object of a library: its class is not one of the script's."""


Bar.__module__ = "queue"


def bar():
    made = Bar()
    made.n = 0
    return made


def local():
    made = threading.local()
    made.n = 0
    return made


def database():
    made = sqlite3.connect(":memory:")
    made.execute("create table t (n)")
    return made


def advance(value):
    value.n += 1


THINGS = {
    "count": (itertools.count, next),
    "cycle": (lambda: itertools.cycle([1, 2]), next),
    "generator": (counting, next),
    "list iterator": (lambda: iter([1, 2, 3]), next),
    "range iterator": (lambda: iter(range(3)), next),
    "zip": (lambda: zip([1, 2], itertools.count()), next),
    "map": (lambda: map(str, counting()), next),
    "enumerate": (lambda: enumerate([1, 2]), next),
    "loader": (lambda: iter(DataLoader(range(4))), next),
    "queue": (queue.Queue, lambda value: value.put(1)),
    "taken from a queue": (lambda: [one := queue.Queue(), one.put(1)][0], lambda value: value.get()),
    "simple queue": (queue.SimpleQueue, lambda value: value.put(1)),
    "bar": (bar, advance),
    "local": (local, advance),
    "list of a library": (collections.UserList, lambda value: value.append(1)),
    "dict of a library": (lambda: collections.UserDict(n=1), lambda value: value.update(n=2)),
    "weak dict": (weakref.WeakKeyDictionary, lambda value: value.update({queue.Queue: 1})),
    "file to read": (lambda: open(__file__), lambda value: value.readline()),
    "file to iterate over": (lambda: open(__file__, "rb"), next),
    "text to iterate over": (lambda: open(__file__), next),
    "database": (database, lambda value: value.execute("insert into t values (1)")),
}
# Where an iterator does not show its place, having the name of one is enough.
OPAQUE = {"cycle"}
THING = None


class Global(nn.Module):
    def __init__(self, advance):
        super().__init__()
        self.a, self.advance = nn.Linear(6, 3), advance

    def forward(self, x):
        if self.advance:
            self.advance(THING)
        return self.a(x)


class Attribute(nn.Module):
    def __init__(self, advance):
        super().__init__()
        self.a, self.advance, self.thing = nn.Linear(6, 3), advance, THING

    def forward(self, x):
        if self.advance:
            self.advance(self.thing)
        return self.a(x)


def around(advance):
    thing = THING

    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(6, 3)

        def forward(self, x):
            if advance:
                advance(thing)
            return self.a(x)

    return Inner()


def reason(net):
    x, y = data()
    with Solo(net) as solo:
        F.cross_entropy(solo(x), y).backward()
        return solo.recorder.pack()


@pytest.mark.parametrize("place", [Global, Attribute, around])
@pytest.mark.parametrize("name", THINGS)
def test_what_was_used_is_a_reason(name, place, monkeypatch):
    make, use = THINGS[name]
    monkeypatch.setitem(globals(), "THING", make())
    why = reason(place(use))
    assert why is not None and why.lower() == "the forward changes thing of the script, which would not be put back"


@pytest.mark.parametrize("place", [Global, Attribute, around])
@pytest.mark.parametrize("name", sorted(THINGS.keys() - OPAQUE))
def test_what_was_not_used_is_none(name, place, monkeypatch):
    monkeypatch.setitem(globals(), "THING", THINGS[name][0]())
    assert reason(place(None)) is None


def test_an_iterator_that_no_code_of_the_module_names_does_not_matter():
    net = Global(None)
    net.batches = itertools.cycle([1])
    assert reason(net) is None


def test_what_cannot_be_pickled_in_a_container_of_the_module_does_not_matter():
    net = Global(None)
    net.things = [iter(DataLoader(range(4)))]
    assert reason(net) is None


def test_an_iterator_at_its_end(monkeypatch):
    monkeypatch.setitem(globals(), "THING", used_up())
    assert reason(Global(lambda value: next(value, None))) is None


def follow_in_place(teacher, student):
    for old, new in zip(teacher.parameters(), student.parameters()):
        old.data.mul_(0.9).add_(new.data, alpha=0.1)


def follow(teacher, student):
    for old, new in zip(teacher.parameters(), student.parameters()):
        old.data = 0.9 * old.data + 0.1 * new.data


class Student(nn.Module):
    def __init__(self, kept, follows):
        super().__init__()
        self.a, self.follows = nn.Linear(6, 3), follows
        teacher = nn.Linear(6, 3).requires_grad_(False)
        if kept == "hidden":
            vars(self)["teacher"] = teacher
        else:
            self.teacher = teacher if kept == "part" else [teacher]

    def forward(self, x):
        teacher = self.teacher[0] if isinstance(self.teacher, list) else self.teacher
        if self.follows:
            self.follows(teacher, self.a)
        return self.a(x) - teacher(x)


@pytest.mark.parametrize("kept", ["part", "hidden", "listed"])
@pytest.mark.parametrize("follows", [follow, follow_in_place, None])
def test_a_teacher_that_follows_without_a_change_of_version(kept, follows):
    why = reason(Student(kept, follows))
    assert (why is None) == (follows is None)
    assert follows is None or why.startswith("the forward changes its own" if kept == "part" else "the forward changes")
