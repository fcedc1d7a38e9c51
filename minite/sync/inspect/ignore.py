"""Lists of modules that are not quantized, in config.json and hf_quant_config.json, against what the files hold.

Libraries match an entry by its whole name, as a prefix, as whole segments within a name, with ``*``, or (``re:``) as a
regular expression; here a module is listed when any of these finds it. Others look for the entry anywhere in the name,
so that ``mlp.gate`` also finds ``mlp.gate_proj``: what that would swallow is told.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from minite.sync.inspect.findings import ERROR, WARNING, Finding
from minite.sync.inspect.modules import Module
from minite.sync.names import FUSED

CONFIG, QUANT_CONFIG = "config.json", "hf_quant_config.json"
_KEYS = ("ignore", "modules_to_not_convert", "exclude_modules")
_SAFE = 3  # repetitions, and groups, in a regular expression: more may take for ever on a name that almost fits


def listed_modules(quantization: Mapping[str, Any]) -> list[str]:
    """The list of one config, whatever its key; entries that are no text are left out."""
    entries: list[Any] = next((quantization[key] for key in _KEYS if isinstance(quantization.get(key), list)), [])
    return [entry for entry in entries if isinstance(entry, str)]


def check_ignored(entries: Sequence[str], modules: Mapping[str, Module], strict: bool) -> Iterator[Finding]:
    """``strict``: engines take a linear that is not listed for quantized (ModelOpt and compressed-tensors do)."""
    for entry, count in Counter(entries).items():
        if count > 1:
            yield Finding(WARNING, "listed-twice", entry, f"stands {count} times in the list", "remove one")
    plain, patterns = set(entries), []
    for entry in plain:
        if entry.startswith("re:") or "*" in entry:
            pattern = _pattern(entry)
            if pattern is None:
                yield Finding(
                    WARNING, "pattern", entry, "is too intricate to evaluate and lists nothing", "name modules"
                )
            else:
                patterns.append(pattern)
    used: set[str] = set()
    for name, module in modules.items():
        if not module.linear:
            continue
        hits = {text for text in _segments(name) if text in plain}
        used |= hits
        listed = bool(hits) or any(pattern(name) for pattern in patterns)
        if listed and module.quantized:
            what, mend = "is in the list of modules that are not, yet it is quantized", "take it out of the list"
            yield Finding(ERROR, "listed-but-quantized", name, what, mend)
        if not listed and not module.quantized and not module.format.startswith("FP8"):
            severity = ERROR if strict else WARNING
            what = f"is {module.format}, but not in the list; engines take it for quantized"
            yield Finding(severity, "unlisted", name, what, "add it to the list")
    yield from _unused(plain - used, modules)
    yield from _swallowed(plain, modules)


def check_agreement(config: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[Finding]:
    """The two files say the same. Engines read the one or the other."""
    mine, theirs = set(listed_modules(config)), set(listed_modules(other))
    if mine != theirs:
        differs = sorted(mine ^ theirs)[0]
        what = f"lists {len(theirs)} modules, {CONFIG} {len(mine)}; {differs} is in one of them only"
        yield Finding(WARNING, "two-lists", QUANT_CONFIG, what, "make the lists equal")
    if config.get("quant_algo", other.get("quant_algo")) != other.get("quant_algo"):
        what = f"says quant_algo {other.get('quant_algo')}, {CONFIG} {config.get('quant_algo')}"
        yield Finding(WARNING, "two-lists", QUANT_CONFIG, what, "make them equal")


def _unused(entries: set[str], modules: Mapping[str, Module]) -> Iterator[Finding]:
    """Entries that name nothing; fused names, which engines ask for, stand for their members. Engines also build an
    lm_head, and look for it in the list, where the embedding is tied and no file has one."""
    for entry in sorted(entries):
        head, _, leaf = entry.rpartition(".")
        fused = any(f"{head}.{member}" in modules for member in FUSED.get(leaf, ()))
        if not fused and entry != "lm_head" and not entry.startswith("re:") and "*" not in entry:
            yield Finding(WARNING, "names-nothing", entry, "is in the list, but no such module is there", "remove it")


def _swallowed(entries: set[str], modules: Mapping[str, Module]) -> Iterator[Finding]:
    """Quantized modules that a search for the entry anywhere in a name would find."""
    quantized = "\n".join(["", *(name for name, module in modules.items() if module.quantized), ""])
    for entry in sorted(entries):
        at, names = quantized.find(entry), set()
        while at >= 0 and entry:
            start, end = quantized.rfind("\n", 0, at) + 1, quantized.find("\n", at)
            name = quantized[start:end]
            if entry not in _segments(name):
                names.add(name)
            at = quantized.find(entry, end)
        if names:
            what = f"read as part of a name it also finds {min(names)} ({len(names)} quantized modules)"
            yield Finding(WARNING, "substring", entry, what, "check that your engine matches whole segments")


def _segments(name: str) -> set[str]:
    """Every run of whole segments: of a.b.c also a.b, b.c and b."""
    parts = name.split(".")[:16]
    return {".".join(parts[i:j]) for i in range(len(parts)) for j in range(i + 1, len(parts) + 1)}


def _pattern(entry: str) -> Any:
    """A function from a name to whether the pattern fits; None for one that is broken or may take for ever."""
    if not entry.startswith("re:"):
        return lambda name: fnmatchcase(name, entry)
    text = entry.removeprefix("re:")
    repeated = re.sub(r"[*+}]\?", "*", text)  # a lazy repetition is one
    if len(re.findall(r"[*+{?]", repeated)) > _SAFE or text.count("(") > _SAFE or re.search(r"\)[*+{?]", text):
        return None
    try:
        return re.compile(text).match
    except (re.error, OverflowError, RecursionError):
        return None
