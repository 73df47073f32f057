"""Output that a page promises is found, and missing output is noticed."""

from support.program import Done
from support.typed_pages import Command, Page, look_at

PAGE = Page(
    "page",
    """
```python title="one.py"
print(1)
```

```sh
$ not typed
```

```console
$ paceline run -n 2 one.py  # ends with code 75
[0] done: abcdef0123456789
$ paceline doctor  # ends with code 0, or 1: there is a problem
host0$ first --rendezvous host0:29400
host1$ second --rendezvous host0:29400
what both say
```
""",
)


def test_a_page_is_read_as_its_rules_say():
    assert PAGE.scripts == {"one.py": "print(1)\n"}
    assert PAGE.turns == [
        (Command("paceline run -n 2 one.py", codes=(75,), shown=("[0] done: abcdef0123456789",)),),
        (Command("paceline doctor", codes=(0, 1)),),
        (
            Command("first --rendezvous host0:29400", "host0"),
            Command("second --rendezvous host0:29400", "host1", shown=("what both say",)),
        ),
    ]


BITS, OTHERS = "0123456789abcdef", "fedcba9876543210"
CASES = {
    "other figures": (["took 3 ms"], "took 17 ms", True),
    "another unit": (["took 3 ms"], "took 1.2 s", True),
    "another word": (["took 3 ms"], "spent 17 ms", False),
    "anything between": (["a ... z"], "a b c z", True),
    "more around it": (["b  c"], "a b c d", True),
    "the same bits": ([f"one {BITS}", f"two {BITS}"], f"one {OTHERS}\ntwo {OTHERS}", True),
    "not the same bits": ([f"one {BITS}", f"two {BITS}"], f"one {OTHERS}\ntwo {BITS}", False),
    "not other bits": ([f"one {BITS}", f"two {OTHERS}"], f"one {OTHERS}\ntwo {OTHERS}", False),
}


def fails(check, *given):
    try:
        check(*given)
    except AssertionError:
        return True
    return False


def test_what_is_shown_must_come():
    for name, (shown, said, holds) in CASES.items():
        assert fails(look_at, Done(0, said, ""), tuple(shown), {}) != holds, name


def test_a_command_ends_as_the_page_says():
    command = Command("doctor", codes=(0, 1))
    assert [fails(command.check_end, Done(code, "", "")) for code in (0, 1, 2)] == [
        False,
        False,
        True,
    ]
