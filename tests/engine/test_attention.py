"""Every attention call of the real engine, recomputed from a log of keys by (request, position)."""

from tests.engine.conftest import CHUNK, GREEDY, PLACEHOLDER, Bench, picture

TOLERANCE = 2e-5


def requests(bench: Bench, mark: str) -> None:
    """Mixed lengths in one batch, a cut prompt, decoding side by side; nothing shares a prefix with anything."""
    prompts = [
        f"{mark}{i} " + text for i, text in enumerate(["a", "Repeat: red.", f"{PLACEHOLDER}What?", "blue " * 60])
    ]
    bench.together(prompts, [None, None, [picture(50)], None], GREEDY)
    bench.together([f"{mark} " + "red " * (CHUNK + 20)], [None], GREEDY)


def test_attention_reads_the_right_keys(bench: Bench) -> None:
    with bench.switched(attention="check"), bench.records("attention") as calls:
        requests(bench, "Q")
    seen = {(c["model"], c["mode"], c["step"]) for c in calls}
    for kind in [("target", "EXTEND", None), ("target", "TARGET_VERIFY", None), ("draft", "EXTEND", None),
                 ("draft", "DRAFT_EXTEND_V2", None), ("draft", "DECODE", 0), ("draft", "DECODE", 1)]:  # fmt: skip
        assert kind in seen, seen
    worst = max(calls, key=lambda c: c["error"])
    assert worst["error"] < TOLERANCE, worst


def test_the_check_notices_one_missing_key(bench: Bench) -> None:
    """Negative control: each draft step loses its newest key."""
    with bench.switched(attention="corrupt"), bench.records("attention") as calls:
        requests(bench, "W")
    steps = [c["error"] for c in calls if c["step"] is not None]
    others = [c["error"] for c in calls if c["step"] is None]
    assert min(steps) > TOLERANCE and max(steps) > 100 * TOLERANCE, (min(steps), max(steps))
    assert max(others) < TOLERANCE
