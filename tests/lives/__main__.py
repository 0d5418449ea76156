"""Run histories from the command line: `python -m tests.lives --help`."""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

REPRODUCE = "python -m tests.lives --seeds {seed} --trace"


def main(arguments: list[str] | None = None) -> int:
    """Run what the command line asks for; 1 if a law was broken."""
    parser = argparse.ArgumentParser("python -m tests.lives", description=__doc__)
    parser.add_argument("--seeds", default="0-299", help="as in 0-99,120 (default: 0-299)")
    parser.add_argument("--jobs", type=int, default=1, help="processes to run them in")
    parser.add_argument("--laws", help="check these alone, as in ends,conserved")
    parser.add_argument("--resume", type=Path, help="note seeds in this file, and skip those in it")
    parser.add_argument(
        "--summary", action="store_true", help="count broken laws, with a seed each"
    )
    parser.add_argument("--trace", action="store_true", help="print what happened, line by line")
    parser.add_argument("--verbose", action="store_true", help="with --trace: every message too")
    parser.add_argument("--twice", action="store_true", help="run each seed twice, and compare")
    parser.add_argument("--mutant", help="put a fault back first; see mutants.py")
    parser.add_argument("--stop", action="store_true", help="stop at the first broken law")
    options = parser.parse_args(arguments)
    seeds = list(_seeds(parser, options.seeds))
    laws = _laws(parser, options.laws)
    _check_mutant(parser, options.mutant)
    done = _read(options.resume)
    todo = [seed for seed in seeds if seed not in done]
    results = {seed: done[seed] for seed in seeds if seed in done}
    began, count = time.monotonic(), 0
    for result in _run(todo, laws, options):
        count += 1
        results[result["seed"]] = result
        _write(options.resume, result)
        if result["broken"]:
            if not options.summary:
                for law, text in result["broken"]:
                    print(_line(result["seed"], law, text), flush=True)
            if options.stop:
                break
    if options.summary:
        _print_summary(results)
    total = sum(bool(result["broken"]) for result in results.values())
    print(
        f"{len(results)} histories, {total} broke a law; {count} run in "
        f"{time.monotonic() - began:.0f} s"
    )
    return 1 if total else 0


def run_one(seed: int, laws: tuple[str, ...], options: dict[str, Any]) -> dict[str, Any]:
    """Play one history and check it."""
    import torch

    from . import history
    from . import laws as law_book
    from .mutants import MUTANTS

    torch.set_num_threads(1)
    began = time.process_time()
    mutant = MUTANTS[options["mutant"]].patch if options["mutant"] else contextlib.nullcontext
    with mutant():
        played = history.play(seed, verbose=options["verbose"])
    try:
        broken = law_book.check(played, laws)
    except Exception as error:  # a history that no law can read must not end all the others
        broken = [("readable", f"the laws cannot read this history: {error!r}")]
    if options["twice"]:
        again = history.play(seed)
        if again.digest != played.digest:
            broken.append(("deterministic", f"{played.digest} is followed by {again.digest}"))
    if options["trace"]:
        print("\n".join([*played.plan.describe(), *played.log]))
    result = {
        "seed": seed,
        "broken": broken,
        "digest": played.digest,
        "seconds": round(time.process_time() - began, 3),
        "virtual": round(played.seconds, 1),
    }
    del played
    gc.collect()
    return result


def _run(seeds: list[int], laws: tuple[str, ...], options: Any) -> Iterator[dict[str, Any]]:
    plain = {key: getattr(options, key) for key in ("verbose", "twice", "trace", "mutant")}
    if options.jobs <= 1:
        for seed in seeds:
            yield run_one(seed, laws, plain)
        return
    with ProcessPoolExecutor(options.jobs) as pool:
        waiting = {pool.submit(run_one, seed, laws, plain) for seed in seeds}
        try:
            for future in as_completed(waiting):
                yield future.result()
        finally:
            for future in waiting:
                future.cancel()


def _line(seed: int, law: str, text: str) -> str:
    return f"seed {seed}: law {law}: {text}; reproduce: {REPRODUCE.format(seed=seed)}"


def _print_summary(results: dict[int, dict[str, Any]]) -> None:
    """Print, for every broken law, in how many histories it was, and one that shows it."""
    seeds: dict[str, list[int]] = defaultdict(list)
    text: dict[str, str] = {}
    for seed, result in sorted(results.items()):
        for law in dict.fromkeys(law for law, _ in result["broken"]):
            seeds[law].append(seed)
            text.setdefault(law, next(t for name, t in result["broken"] if name == law))
    for law, count in Counter({law: len(each) for law, each in seeds.items()}).most_common():
        print(f"{law}: {count} of {len(results)} histories, seeds {seeds[law][:8]}")
        print(f"    {_line(seeds[law][0], law, text[law])}")


def _seeds(parser: argparse.ArgumentParser, text: str) -> Iterable[int]:
    for part in text.split(","):
        first, _, last = part.partition("-")
        try:
            yield from range(int(first), int(last or first) + 1)
        except ValueError:
            parser.error(f"--seeds: {part!r} is no seed and no range; write 0-99,120")


def _laws(parser: argparse.ArgumentParser, text: str | None) -> tuple[str, ...]:
    from .laws import LAWS

    chosen = tuple(LAWS) if text is None else tuple(text.split(","))
    for name in chosen:
        if name not in LAWS:
            parser.error(f"--laws: there is no law {name!r}; there are {', '.join(LAWS)}")
    return chosen


def _check_mutant(parser: argparse.ArgumentParser, name: str | None) -> None:
    from .mutants import MUTANTS

    if name is not None and name not in MUTANTS:
        parser.error(f"--mutant: there is no {name!r}; there are {', '.join(MUTANTS)}")


def _read(path: Path | None) -> dict[int, dict[str, Any]]:
    """Read results of an earlier run; a last line that was cut is left out, and run again."""
    if path is None or not path.exists():
        return {}
    results = {}
    for line in path.read_text("utf-8").splitlines():
        try:
            result = json.loads(line)
        except ValueError:
            continue
        results[result["seed"]] = result
    return results


def _write(path: Path | None, result: dict[str, Any]) -> None:
    if path is not None:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets of names is part of a history
        environment = {**os.environ, "PYTHONHASHSEED": "0"}
        os.execve(sys.executable, [sys.executable, "-m", "tests.lives", *sys.argv[1:]], environment)
    sys.exit(main())
