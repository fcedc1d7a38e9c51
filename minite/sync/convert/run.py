"""The conversion: unit by unit from the source into the files of a partial directory, which then gets its name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minite import __version__
from minite.config import PrecisionPlan, RunConfig, resolve_plan
from minite.errors import UserError
from minite.models import get_model
from minite.sync.checkpoint import INDEX, Checkpoint, index_json, read_json, regular_file, write_json
from minite.sync.convert.inputs import input_scales
from minite.sync.convert.layout import Unit, files, units
from minite.sync.convert.output import OutputFile
from minite.sync.convert.partial import JOURNAL, Partial, clean
from minite.sync.digests import DIGEST_FILE, digest_json
from minite.sync.export import Quantizer, check_tensor, quantize_group
from minite.sync.reconcile import ScaleCost, share_outer, untied
from minite.sync.source import AMAX_FILE, Held, Source
from minite.sync.stored import MODEL_DTYPES, to_parts
from minite.sync.targets import QUANT_CONFIG, configs, retarget
from minite.sync.tensor_file import save_tensors

FILE_BYTES = 1 << 30  # of one output file: what an interruption loses at most
REPORT_FILE = "minite_report.json"
_OWN = {"config.json", QUANT_CONFIG, INDEX, DIGEST_FILE, REPORT_FILE}  # written anew; other small files are copied
_COPIED = (".json", ".txt", ".jinja", ".model")

Progress = Callable[[int, int], None]  # (bytes of BF16 done, in all)


@dataclass(frozen=True)
class Report:
    """What of a source that others had quantized was not as it should be."""

    untied: list[ScaleCost] = field(default_factory=list)  # members of groups with several outer scales
    shared: bool = False  # these were given one; else the costs are what that would cost
    inputs: dict[str, str] = field(default_factory=dict)  # module -> what was wrong with its input scale


def convert(
    source: str | Path,
    target: str | Path,
    config: RunConfig,
    quantizer: Quantizer,
    to: str = "nvfp4",
    *,
    outer_scales: str = "keep",
    progress: Progress | None = None,
    file_bytes: int = FILE_BYTES,
) -> Report:
    """Convert a checkpoint directory, in the memory of two fusion groups.

    ``target`` appears whole or not at all. Interrupted, the conversion leaves ``target``.partial, and the same call
    goes on with it; the result has the same bytes as an uninterrupted one.

    Args:
        source: directory of the recipe's model: BF16 or FP32, or NVFP4 (ModelOpt, compressed-tensors), or block FP8.
        config: recipe of the model; its precision plan says what is quantized and, for "nvfp4", how.
        quantizer: a backend; all give the same bytes.
        to: "nvfp4" | "bf16" | "fp8". NVFP4 codes go to "nvfp4" verbatim.
        outer_scales: "keep" those of an NVFP4 source, or make them "shared" within fusion groups (reconcile.py).

    Raises:
        UserError: for a source that is damaged or not the recipe's model, a target that exists, a plan that the format
            cannot express, a partial directory of another conversion, a disk that is full or cannot be written. Nothing
            is left behind, but a partial directory of another conversion, and after trouble with the disk.
    """
    target = Path(target)
    try:
        job = Conversion(Path(source), config, quantizer, to, outer_scales, progress or (lambda done, total: None))
        layout = files(units(job.plan, job.shapes, to, job.dtype), file_bytes)
        header = job.header(file_bytes)
        if clean(target, header):
            return Report()
        return _run(job, layout, Partial(target, header, list(layout)))
    except OSError as error:
        text = f"{target}: {error}; mend that (space, rights, another DST), then the same command goes on"
        raise UserError(text) from error


def _run(job: Conversion, layout: Mapping[str, list[Unit]], partial: Partial) -> Report:
    try:
        job.skip([unit for record in partial.finished for unit in layout[record["file"]]])
        for name in list(layout)[len(partial.finished) :]:
            partial.record(job.write_file(partial.path / name, layout[name]))
        report = job.finish(partial, layout)
        partial.publish()
    except UserError:
        partial.discard()
        raise
    except BaseException:  # Ctrl-C, a full disk: what is finished stays for the next run
        partial.close()
        raise
    return report


class Conversion:
    """One conversion: what is read, and how a unit of it becomes tensors of a file."""

    def __init__(
        self, source: Path, config: RunConfig, quantizer: Quantizer, to: str, outer_scales: str, progress: Progress
    ) -> None:
        self.recipe_plan = resolve_plan(config)
        self.plan, self.to = retarget(self.recipe_plan, to), to
        self.shapes = get_model(config.model.kind).hf_tensors(config.model)
        self.dtype = MODEL_DTYPES[config.model.dtype]
        self.reader = Checkpoint(source)
        self.source = Source(self.reader, self.shapes)
        hf_config = read_json(source / "config.json")
        self.configs = configs(to, self.plan, hf_config, self.dtype)
        self.copied = _copied(source)
        _check_tied(source, hf_config, config)
        self.quantizer, self.progress, self.outer_scales = quantizer, progress, outer_scales
        self.fingerprint = self.reader.fingerprint()
        self.inputs, self.input_faults = _check_source(self.source, self.plan, to, outer_scales)
        self.done, self.total = 0, sum(_elements(shape) for shape in self.shapes.values()) * 2

    def header(self, file_bytes: int) -> dict[str, Any]:
        """What must be equal for a conversion to be continued."""
        return {
            "source": self.fingerprint,
            "plan": self.recipe_plan.digest,
            "to": self.to,
            "outer scales": self.outer_scales,
            "minite version": __version__,
            "file size": file_bytes,
        }

    def skip(self, finished: list[Unit]) -> None:
        """Count units that an earlier run has written."""
        for unit in finished:
            self._count(unit)

    def write_file(self, path: Path, content: list[Unit]) -> dict[str, Any]:
        """Write one file and return its record for the journal."""
        stored = {name: one for unit in content for name, one in unit.disk.items()}
        costs: list[ScaleCost] = []
        with OutputFile(path, stored, self.to, self.plan, self.inputs) as file:
            for unit in content:
                tensors, unit_costs = self.tensors_of(unit)
                file.add(tensors)
                costs += unit_costs
                self._count(unit)
            return {**file.finish(), "untied": [asdict(cost) for cost in costs]}

    def tensors_of(self, unit: Unit) -> tuple[dict[str, Tensor], list[ScaleCost]]:
        """What a sampler would be sent for the unit, and what its outer scales cost."""
        read = {name: self.source.read(name) for name in unit.names}
        held = {name.removesuffix(".weight"): value for name, value in read.items() if isinstance(value, Held)}
        if not held or self.to == "bf16":
            plain = {
                name: (value.dequantize(self.dtype) if isinstance(value, Held) else value).to(self.dtype)
                for name, value in read.items()
            }
            for name, tensor in plain.items():
                check_tensor(name, tensor, self.plan, self.shapes)
            if not unit.members:
                return plain, []
            named = {name.removesuffix(".weight"): tensor for name, tensor in plain.items()}
            return quantize_group(unit.members, named, self.quantizer), []
        group = {name: value.q for name, value in held.items()}
        costs: list[ScaleCost] = []
        if untied(group):
            reconciled, costs = share_outer(group)
            group = reconciled if self.outer_scales == "shared" else group
        return {f"{name}.{part}": t for name, q in group.items() for part, t in to_parts(q).items()}, costs

    def finish(self, partial: Partial, layout: Mapping[str, list[Unit]]) -> Report:
        """Everything but the large files."""
        home = {tensor: name for name, content in layout.items() for unit in content for tensor in unit.disk}
        total = sum(unit.nbytes for content in layout.values() for unit in content)
        write_json(partial.path / INDEX, index_json(home, total))
        for name, data in self.configs.items():
            write_json(partial.path / name, data)
        amaxes = {name: value for record in partial.finished for name, value in record["amax"].items()}
        if amaxes:
            save_tensors(partial.path / AMAX_FILE, {name: torch.tensor(value) for name, value in amaxes.items()})
        sent, disk_only = (
            {name: digest for record in partial.finished for name, digest in record[kind].items()}
            for kind in ("sent", "disk_only")
        )
        plan_digest = self.recipe_plan.digest
        digests = digest_json(sent, disk_only, plan_digest=plan_digest, to=self.to, source=self.fingerprint)
        write_json(partial.path / DIGEST_FILE, digests)
        costs = [ScaleCost(**cost) for record in partial.finished for cost in record["untied"]]
        report = Report(costs, self.outer_scales == "shared", self.input_faults)
        if costs or self.input_faults:
            write_json(partial.path / REPORT_FILE, asdict(report))
        for file in self.copied:
            shutil.copyfile(file, partial.path / file.name)
        return report

    def _count(self, unit: Unit) -> None:
        self.done += sum(_elements(self.shapes[name]) for name in unit.names) * 2
        self.progress(self.done, self.total)


def _copied(source: Path) -> list[Path]:
    """Small files that the target gets as they are: tokenizer, chat template and the like."""
    own = {*_OWN, JOURNAL}
    found = [path for path in sorted(source.iterdir()) if path.suffix in _COPIED and path.name not in own]
    return [regular_file(source, path.name) for path in found if not path.is_dir()]


def _check_tied(source: Path, hf_config: Mapping[str, Any], config: RunConfig) -> None:
    """A tied model has no lm_head: with the wrong setting it would be left out, and config.json ask for it."""
    tied = bool(hf_config.get("tie_word_embeddings"))
    if tied != config.model.tie_word_embeddings:
        raise UserError(
            f"{source}/config.json: tie_word_embeddings is {json.dumps(tied)}, but model.tie_word_embeddings of the "
            f"recipe is not ({config.where('model.tie_word_embeddings')}); give the recipe of this model"
        )


def _check_source(
    source: Source, plan: PrecisionPlan, to: str, outer_scales: str
) -> tuple[dict[str, float], dict[str, str]]:
    """Whether the source can become ``to``; its known input scales, and what was wrong with others."""
    where = source.reader.directory
    unknown = source.unknown()
    if unknown:
        more = f" (and {len(unknown) - 1} others)" if len(unknown) > 1 else ""
        raise UserError(
            f"{where}: {unknown[0]} is not a tensor of the recipe's model{more}; give the recipe of this model"
        )
    quantized = [name.removesuffix(".weight") for name, shape in source.shapes.items() if len(shape) == 2]
    schemes = {module: scheme for module in quantized if (scheme := source.scheme(module)) is not None}
    nvfp4 = {module: scheme for module, scheme in schemes.items() if scheme.convention is not None}
    if outer_scales == "shared" and not (nvfp4 and to == "nvfp4"):
        raise UserError(f"{where}: outer scales can be shared only from NVFP4 to nvfp4; leave the option out")
    if to == "bf16":
        return {}, {}
    for module, scheme in schemes.items():
        entry = plan.get(module)
        if to == "fp8" or scheme.convention is None:
            raise UserError(f"{where}: {module} is quantized already ({scheme.name}); convert it --to bf16 first")
        if entry is None or entry.weight == "bf16":
            raise UserError(
                f"{where}: {module} is quantized ({scheme.name}), but the recipe keeps it BF16; "
                "use a recipe that quantizes the same modules, or convert --to bf16 first"
            )
        absent = [e.name for e in plan.group_members(entry.group) if e.name not in nvfp4] if entry.group else []
        if absent:
            raise UserError(f"{where}: {module} is quantized, but {absent[0]} of the same fusion group is not")
    return input_scales(source, nvfp4)


def _elements(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()
