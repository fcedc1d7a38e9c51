"""The rules of a recipe applied to module names: which rule decides which module, and which modules share a scale."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from minite.config.build import nearest
from minite.config.match import compile_pattern
from minite.config.schema import RuleConfig, RunConfig
from minite.errors import UserError

_Test = Callable[[str], bool]


def decide(config: RunConfig, names: Sequence[str]) -> dict[str, int]:
    """Module name -> index of the first rule that matches it.

    Raises UserError for an unknown format, a module that no rule matches and a rule that decides no module.
    """
    rules = config.precision.rules
    known = ["bf16", *config.precision.formats]
    for i, rule in enumerate(rules):
        if rule.use not in known:
            where = config.where(f"precision.rules[{i}].use")
            raise UserError(f"{where}: rule {i} uses unknown format '{rule.use}'; {nearest(rule.use, known)}")
    tests = [_test_of(config, i) for i in range(len(rules))]
    deciding = _first_matches(tests, names)
    uncovered = [name for name in names if name not in deciding]
    if uncovered:
        kinds = ", ".join(dict.fromkeys(numberless(name) for name in uncovered))
        raise UserError(
            f"{config.where('precision.rules')}: no rule covers '{uncovered[0]}' ({len(uncovered)} modules: {kinds}); "
            'add a rule for them, e.g. {match: "**", use: bf16} at the end'
        )
    for i in range(len(rules)):
        if i not in deciding.values():
            raise _dead_rule(config, i, names, tests[i], deciding)
    return deciding


def without_dead_rules(config: RunConfig, names: Sequence[str]) -> tuple[RuleConfig, ...]:
    """The rules that decide a module. Raises UserError for a rule that cannot be read."""
    rules = config.precision.rules
    used = set(_first_matches([_test_of(config, i) for i in range(len(rules))], names).values())
    return tuple(rule for i, rule in enumerate(rules) if i in used)


def _first_matches(tests: Sequence[_Test], names: Sequence[str]) -> dict[str, int]:
    found = {name: next((i for i, test in enumerate(tests) if test(name)), None) for name in names}
    return {name: i for name, i in found.items() if i is not None}


def rule_text(config: RunConfig, index: int) -> str:
    """Where a rule stands and what it says, for messages and for plan.json."""
    rule = config.precision.rules[index]
    selectors = [] if rule.match is None else [f"match {rule.match}"]
    selectors += [] if rule.layers is None else [f"layers {list(rule.layers)}"]
    return f"{config.where(f'precision.rules[{index}]')}: rule {index} ({', '.join(selectors)} -> {rule.use})"


def numberless(name: str) -> str:
    """The name with every number replaced by *: one pattern for all layers and experts."""
    return ".".join("*" if segment.isdigit() else segment for segment in name.split("."))


def _test_of(config: RunConfig, index: int) -> _Test:
    rule, where = config.precision.rules[index], config.where(f"precision.rules[{index}]")
    if rule.match is None and rule.layers is None:
        raise UserError(f"{where}: rule {index} names no module; give it match, layers or both")
    try:
        pattern = compile_pattern("**" if rule.match is None else rule.match)
    except ValueError as error:
        raise UserError(
            f"{where}: rule {index}: {error} is not a whole segment; "
            "expected a name, * for one segment or ** for any number of them"
        ) from None
    count = config.model.num_layers
    for layer in rule.layers or ():
        if not -count <= layer < count:
            raise UserError(
                f"{where}: rule {index} names layer {layer}, but the model has {count} layers; "
                f"expected {-count} to {count - 1}"
            )
    prefixes = ("",) if rule.layers is None else tuple(f"model.layers.{layer % count}." for layer in rule.layers)
    return lambda name: name.startswith(prefixes) and pattern.fullmatch(name + ".") is not None


def _dead_rule(config: RunConfig, index: int, names: Sequence[str], test: _Test, deciding: dict[str, int]) -> UserError:
    rule, head = config.precision.rules[index], f"{rule_text(config, index)} decides no module"
    matched = [name for name in names if test(name)]
    if matched:
        above = "; ".join(rule_text(config, i) for i in sorted({deciding[name] for name in matched}))
        return UserError(f"{head}: all {len(matched)} it matches are decided above by {above}; move it up or remove it")
    if rule.layers == ():
        return UserError(f"{head}: its list of layers is empty; name some or remove it")
    assert rule.match is not None  # a layer that exists has linears
    place = "" if rule.layers is None else " in these layers"
    kinds = dict.fromkeys(numberless(name) for name in names)
    return UserError(f"{head}: nothing{place} matches; {nearest(rule.match, kinds)}")


def fusion_groups(config: RunConfig, names: Sequence[str]) -> dict[str, str]:
    """Module name -> fusion group: siblings whose last segments stand together in ``precision.fused``."""
    present = set(names)
    groups: dict[str, str] = {}
    for i, leaves in enumerate(config.precision.fused):
        head = f"{config.where(f'precision.fused[{i}]')}: precision.fused[{i}] {list(leaves)}"
        if len(leaves) < 2:
            raise UserError(f"{head} names fewer than two modules; remove it")
        parents = [name.removesuffix(f".{leaves[0]}") for name in names if name.endswith(f".{leaves[0]}")]
        if not parents:
            known = dict.fromkeys(name.rpartition(".")[2] for name in names)
            raise UserError(f"{head} groups no module: none is called '{leaves[0]}'; {nearest(leaves[0], known)}")
        for parent in parents:
            for leaf in leaves:
                name = f"{parent}.{leaf}"
                if name not in present:
                    raise UserError(f"{head}: '{name}' does not exist; remove it from the list")
                if name in groups:
                    raise UserError(f"{head}: '{name}' is already in group '{groups[name]}'; keep it in one")
                groups[name] = f"{parent}.{_group_name(leaves)}"
    return groups


def _group_name(leaves: Sequence[str]) -> str:
    """[q_proj, k_proj, v_proj] -> qkv_proj; [gate_proj, up_proj] -> gate_up_proj."""
    stems = [leaf.removesuffix("_proj") for leaf in leaves]
    return ("" if all(len(stem) == 1 for stem in stems) else "_").join(stems) + "_proj"
