"""Names and layouts of parameters in model files, for loading and export. No jax.

A file tensor may hold several of our parameters (`Layout.joined`); one of our parameters may be several file tensors,
one for each stacked layer and expert.
"""

import dataclasses
import itertools
import re
from collections.abc import Iterator, Sequence

from podium.models.architecture import LAYERS, DecoderConfig
from podium.models.families import FAMILIES
from podium.models.files.tensor_layout import NAMES, FileKind, Layout
from podium.models.params import own_name, param_specs

FIRST_APART = re.compile(r"model\.layers\.\d+\.mlp\.experts\.0\.gate_proj\.weight")
"""Names of tensors in files that store each expert separately."""

INVERSE_FREQUENCIES = "rotary_emb.inv_freq"
"""End of the names of rotary frequencies, which old files hold and which follow from the config."""


def layout_of(param: str, config: DecoderConfig, kind: FileKind = "folder") -> Layout:
    """Name and layout, in a model's files, of one of our parameters."""
    name = LAYERS + own_name(param) if param.startswith(LAYERS) else param
    block = next((place.block for place in config.places if param.startswith(place.prefix)), None)
    own = FAMILIES[config.model_type].names(kind, block)
    return own[name] if name in own else NAMES[name]


def head_tensors(config: DecoderConfig) -> tuple[str, str]:
    """The names of the embedding and of the head in a folder."""
    return layout_of("embed", config).hf, layout_of("head", config).hf


def layers_of(param: str, config: DecoderConfig) -> Sequence[int]:
    """Indices of the decoder's layers that a parameter stacks, in order; empty for one outside the layers."""
    return next((place.layers for place in config.places if param.startswith(place.prefix)), ())


@dataclasses.dataclass(frozen=True, kw_only=True)
class FilePart:
    """The rows of a file tensor that hold one of our parameters, or one of its layers or experts."""

    tensor: str
    param: str
    index: tuple[int, ...]
    """Index into the stacked dimensions of our parameter."""
    shape: tuple[int, ...]
    """Our shape, without the stacked dimensions."""
    at: tuple[int, ...]
    """Index into the tensor's dimensions before its rows: the expert, in a tensor that holds all."""
    first: int
    """First row in the tensor."""
    rows: int
    """Rows of the tensor, including other parameters' rows."""
    lead: tuple[int, ...]
    """The tensor's dimensions before its rows."""
    layout: Layout
    """Layout of the weight in the file."""

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        return (*self.lead, self.rows, *self.layout.file_shape(self.shape)[1:])

    @property
    def lane(self) -> int | None:
        """Index of the weight along the file's dimension G; None without that dimension."""
        return self.layout.lanes.index(own_name(self.param)) if self.layout.lanes else None


def file_parts(config: DecoderConfig, kind: FileKind) -> Iterator[FilePart]:
    """All parts of a model's files, parameter by parameter."""
    specs = param_specs(config)
    for param, spec in specs.items():
        layout, layers = layout_of(param, config, kind), layers_of(param, config)
        name = layout.gguf if kind == "gguf" else layout.hf
        prefix = param.removesuffix(own_name(param))
        rows = {own: layout_of(prefix + own, config, kind).file_rows(specs[prefix + own]) for own in layout.joined}
        rows = rows or {own_name(param): layout.file_rows(spec)}
        before = list(rows)[: list(rows).index(own_name(param))]
        for index in itertools.product(*map(range, spec.shape[: spec.stacked])):
            numbers = (layers[index[0]], *index[1:]) if layers else ()
            at, lead = (index[1:], spec.shape[1 : spec.stacked]) if layout.whole else ((), ())
            yield FilePart(
                tensor=name.format(*numbers),
                param=param,
                index=index,
                shape=spec.shape[spec.stacked :],
                at=at,
                lead=lead,
                first=sum(rows[own] for own in before),
                rows=sum(rows.values()),
                layout=layout,
            )
