"""The optimizer and its learning-rate schedule.

AdamW with decoupled weight decay (https://arxiv.org/abs/1711.05101). Matrices decay, vectors (norm
weights, biases) don't. The warm-up-stable-decay schedule is that of MiniCPM
(https://arxiv.org/abs/2404.06395).

The update is torch's fused kernel, or ours where it is chosen (`layout.kernels`), on each rank's
own shards as plain tensors: parameters of different meshes step in one call. Around it this module
chooses where a parameter's state lies between steps and in which form:

- parameters of 16 bits have an fp32 master copy, which is what steps;
- moments are fp32 (fp64 for fp64 parameters), or 8-bit codes of them (`eight_bit`), 2.03 bytes per
  parameter instead of 8; those of vectors stay as they are;
- the state is on the parameter's device, or waits in (pinned) host memory and travels through the
  device in chunks: one steps while the next is on its way in and the last on its way out.
  (https://arxiv.org/abs/2101.06840 steps on the host instead, whose memory is slower than this
  traffic as soon as several devices share it.)

torchao has an 8-bit AdamW. It isn't used: it needs a compiler for its first step, can't skip a step
on the device, and keeps codes whose blocks run across rows, which no other sharding can load. Ours
are saved as the numbers they stand for (`saved_state`), so
that a checkpoint knows neither codes nor hosts, and a run may change both when it resumes.
"""

from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from paceline.comm.local_part import local_part
from paceline.kernels import switch
from paceline.kernels.adamw import adamw_
from paceline.kernels.adamw.eight_bit import Coded, decode, encode, num_row_dims, zeros
from paceline.train.sharded_state import like, working_dtype

# Elements whose state is decoded or on the device at once: 64 MiB per fp32 tensor.
_CHUNK = 2**24


class AdamW(torch.optim.Optimizer):
    """AdamW whose state may be 8-bit codes, and may wait in host memory.

    `state[p]` holds "step" and, like the parameter (a DTensor where it is one), "exp_avg",
    "exp_avg_sq" and, for one of 16 bits, "master". Of a coded moment it holds "<moment>.codes" and
    "<moment>.scales" instead, plain tensors of this rank's shard. The first dimension of them all,
    "step" aside, is the parameter's own.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        defaults: dict[str, Any],
        *,
        is_coded: bool,
        is_on_host: bool,
    ) -> None:
        super().__init__(groups, defaults)
        self.is_coded = is_coded
        self.is_on_host = is_on_host
        self._roads: dict[torch.device, _HostLanes] = {}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step every parameter that has a gradient, unless `skip_if` says no."""
        for group in self.param_groups:
            ahead: deque[list[_ParameterRows]] = deque()
            for chunk in self._chunks(group["params"]):
                ahead.append([self._fetched(piece) for piece in chunk])
                if len(ahead) > 1:
                    self._update(ahead.popleft(), group)
            for pieces in ahead:
                self._update(pieces, group)

    @torch.no_grad()
    def saved_state(self, p: nn.Parameter) -> dict[str, Any]:
        """What a checkpoint keeps of a parameter's state: no codes, and laid out like it.

        The tensors are the live ones, or else copies on the host. Putting such a dict into
        `state[p]` is all that loading takes: it is coded or sent to the host when next needed.
        """
        for road in self._roads.values():
            road.wait()
        state = self.state[p]
        saved = {key: value for key, value in state.items() if "." not in key}
        for moment in _MOMENTS:
            if f"{moment}.codes" in state:
                saved[moment] = like(p, _decoded_on_host(state, moment, working_dtype(p)))
        return saved

    def _chunks(self, params: list[nn.Parameter]) -> Iterator[list["_ParameterRows"]]:
        """What to step at once: everything, where no state needs room to be worked on."""
        chunk: list[_ParameterRows] = []
        for p in params:
            if p.grad is None:
                continue
            state, local, gradient = self._state_of(p), local_part(p), local_part(p.grad)
            needs_room = self.is_coded or self.is_on_host or "master" in state
            cuts = _row_cuts(local, _CHUNK) if needs_room else [...]
            for cut in cuts:
                own = {key: local_part(v)[cut] for key, v in state.items() if key != "step"}
                # The parts of a parameter take the same step; the last one's counts it.
                steps = state["step"] if cut is cuts[-1] else state["step"].clone()
                chunk.append(_ParameterRows(local[cut], gradient[cut], steps, own, own))
                if needs_room and sum(piece.parameter.numel() for piece in chunk) >= _CHUNK:
                    yield chunk
                    chunk = []
        if chunk:
            yield chunk

    def _fetched(self, piece: "_ParameterRows") -> "_ParameterRows":
        """The piece with its state on the device, or on its way there."""
        if not self.is_on_host:
            return piece
        road = self._road(piece.parameter.device)
        return piece._replace(near={key: road.fetch(far) for key, far in piece.far.items()})

    def _update(self, pieces: list["_ParameterRows"], group: dict[str, Any]) -> None:
        road = self._road(pieces[0].parameter.device)
        if self.is_on_host:
            road.arrive()
        if all(switch.takes("adamw", piece.parameter) for piece in pieces):
            self._step_in_one_launch(pieces, group)
        else:
            self._step_by_torch(pieces, group)
        if self.is_on_host:
            for piece in pieces:
                for key, near in piece.near.items():
                    road.send(near, piece.far[key])

    def _step_in_one_launch(self, pieces: list["_ParameterRows"], group: dict[str, Any]) -> None:
        """By our kernel, which reads and writes codes and masters itself."""
        for have_master in (False, True):
            chosen = [piece for piece in pieces if ("master" in piece.near) == have_master]
            if not chosen:
                continue
            first, second = ([_stored(piece.near, each) for piece in chosen] for each in _MOMENTS)
            adamw_(
                [piece.parameter for piece in chosen],
                [piece.gradient for piece in chosen],
                first,
                second,
                [piece.num_steps for piece in chosen],
                lr=group["lr"],
                betas=group["betas"],
                eps=group["eps"],
                weight_decay=group["weight_decay"],
                found_inf=self._found_inf(chosen[0].parameter.device),
                masters=[piece.near["master"] for piece in chosen] if have_master else None,
            )

    def _step_by_torch(self, pieces: list["_ParameterRows"], group: dict[str, Any]) -> None:
        stepped = [piece.near.get("master", piece.parameter) for piece in pieces]
        moments = [piece.moments() for piece in pieces]
        tensors = [
            (p, piece.gradient.to(p.dtype), first, second)
            for piece, p, (first, second) in zip(pieces, stepped, moments, strict=True)
        ]
        numbers = [piece.num_steps for piece in pieces]
        tails = [_Tail(*each) for each in zip(tensors, numbers, strict=True) if _has_tail(*each[0])]
        tensors += [tail.padded for tail in tails]
        parameters, gradients, firsts, seconds = map(list, zip(*tensors, strict=True))
        adamw(
            parameters,
            gradients,
            firsts,
            seconds,
            [],
            numbers + [tail.num_steps for tail in tails],
            fused=True,
            found_inf=self._found_inf(stepped[0].device),
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        for tail in tails:
            tail.put_back()
        for piece, (first, second) in zip(pieces, moments, strict=True):
            piece.keep(first, second)

    def _found_inf(self, device: torch.device) -> Tensor | None:
        bad: Tensor | None = getattr(self, "found_inf", None)
        return None if bad is None else bad.to(device)

    def _state_of(self, p: nn.Parameter) -> dict[str, Tensor]:
        """The state in the form and the place it has between steps, whatever it was loaded as."""
        state: dict[str, Any] = self.state[p]
        local, dtype = local_part(p), working_dtype(p)
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=local.device)
        if dtype != p.dtype and "master" not in state:
            state["master"] = like(p, local.to(dtype))
        for moment in _MOMENTS:
            if self.is_coded and p.ndim > 1:
                if f"{moment}.codes" not in state:
                    coded = _coded(state.pop(moment, None), moment, p)
                    state[f"{moment}.codes"], state[f"{moment}.scales"] = coded
            elif moment not in state:
                state[moment] = like(p, torch.zeros_like(local, dtype=dtype))
        if self.is_on_host:
            self._send_home(p, state)
        return state

    def _send_home(self, p: nn.Parameter, state: dict[str, Any]) -> None:
        """Move to the host what isn't there: after the first step, and after loading."""
        for key, value in state.items():
            far = local_part(value)
            is_home = far.device.type == "cpu" and (
                local_part(p).device.type == "cpu" or far.is_pinned()
            )
            if key != "step" and not is_home:
                home = torch.empty(far.shape, dtype=far.dtype, pin_memory=True)
                home.copy_(far)
                state[key] = home if "." in key else like(p, home)

    def _road(self, device: torch.device) -> "_HostLanes":
        if device not in self._roads:
            self._roads[device] = _HostLanes(device)
        return self._roads[device]


_MOMENTS = {"exp_avg": True, "exp_avg_sq": False}
"""Adam's moments, and whether they have a sign."""


class _ParameterRows(NamedTuple):
    """Rows of a parameter and what belongs to them, as views."""

    parameter: Tensor
    gradient: Tensor
    num_steps: Tensor
    """Steps done so far: () fp32."""
    far: dict[str, Tensor]
    """The state where it waits."""
    near: dict[str, Tensor]
    """The state on the parameter's device; the same where it doesn't travel."""

    def moments(self) -> tuple[Tensor, Tensor]:
        """Both moments as numbers, to be updated in place."""
        dtype = working_dtype(self.parameter)
        first, second = (_numbers(self.near, moment, dtype) for moment in _MOMENTS)
        return first, second

    def keep(self, *moments: Tensor) -> None:
        """Write back what was updated in another form."""
        for moment, numbers in zip(_MOMENTS, moments, strict=True):
            if f"{moment}.codes" in self.near:
                coded = _code(numbers, moment, self.near[f"{moment}.scales"].ndim - 1)
                self.near[f"{moment}.codes"].copy_(coded.codes)
                self.near[f"{moment}.scales"].copy_(coded.scales)
        if "master" in self.near:
            self.parameter.copy_(self.near["master"])


_VECTOR = 16
"""Values of the widest vectors of a CPU, in fp32."""


def _has_tail(parameter: Tensor, *others: Tensor) -> bool:
    """Whether torch's kernel for the CPU steps the last values of a tensor by themselves."""
    is_odd = parameter.device.type == "cpu" and parameter.numel() % _VECTOR != 0
    return is_odd and all(each.is_contiguous() for each in (parameter, *others))


class _Tail:
    """The last values of a parameter, its gradient and moments, filled up to a vector.

    torch's kernel rounds differently there, so that a value would depend on where a shard ends.
    They step once more as a whole vector, from what they were, and that counts.
    """

    def __init__(self, tensors: tuple[Tensor, Tensor, Tensor, Tensor], num_steps: Tensor) -> None:
        self._count = tensors[0].numel() % _VECTOR
        self._ends = [each.view(-1)[-self._count :] for each in tensors]
        parameter, gradient, first, second = map(self._filled, self._ends)
        self.padded = parameter, gradient, first, second
        self.num_steps = num_steps.clone()

    def _filled(self, end: Tensor) -> Tensor:
        return torch.cat([end, end.new_zeros(_VECTOR - self._count)])

    def put_back(self) -> None:
        """Replace what the values have become with their tensors."""
        parameter, _, first, second = self.padded
        for end, own in zip(
            (self._ends[0], *self._ends[2:]), (parameter, first, second), strict=True
        ):
            end.copy_(own[: self._count])


class _HostLanes:
    """Copies between a device and the host, one lane each way; on a CPU plain copies."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._lanes = (
            (torch.cuda.Stream(device), torch.cuda.Stream(device))
            if device.type == "cuda"
            else None
        )

    def fetch(self, far: Tensor) -> Tensor:
        """A copy on the device, which is complete after `arrive`."""
        near = torch.empty_like(far, device=self.device)
        if self._lanes is None:
            return near.copy_(far)
        inward, outward = self._lanes
        inward.wait_stream(torch.cuda.current_stream(self.device))
        inward.wait_stream(outward)
        with torch.cuda.stream(inward):
            near.copy_(far, non_blocking=True)
        return near

    def arrive(self) -> None:
        """Let what is launched from now on see everything fetched so far."""
        if self._lanes is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._lanes[0])

    def send(self, near: Tensor, far: Tensor) -> None:
        """Copy to the host, which has it after `wait`."""
        if self._lanes is None:
            far.copy_(near)
            return
        outward = self._lanes[1]
        outward.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(outward):
            far.copy_(near, non_blocking=True)
        near.record_stream(outward)

    def wait(self) -> None:
        """Let the host wait for what was sent."""
        if self._lanes is not None:
            self._lanes[1].synchronize()


def _numbers(state: dict[str, Any], moment: str, dtype: torch.dtype) -> Tensor:
    if moment in state:
        return state[moment]
    coded = _stored(state, moment)
    assert isinstance(coded, Coded)
    numbers = decode(coded, dtype, signed=_MOMENTS[moment])
    return numbers if _MOMENTS[moment] else numbers.square_()


def _stored(state: dict[str, Any], moment: str) -> Tensor | Coded:
    """A moment in the form it has between steps."""
    if moment in state:
        return state[moment]
    return Coded(state[f"{moment}.codes"], state[f"{moment}.scales"])


def _code(numbers: Tensor, moment: str, row_dims: int) -> Coded:
    """Codes of a moment; of the second one's root, which is what divides the step."""
    is_signed = _MOMENTS[moment]
    return encode(numbers if is_signed else numbers.sqrt(), row_dims, signed=is_signed)


def _coded(numbers: Tensor | None, moment: str, p: Tensor) -> Coded:
    """Codes of this rank's shard of a moment of p, or of zeros, some rows at a time."""
    local, row_dims = local_part(p), num_row_dims(p.shape)
    coded = zeros(local.shape, row_dims, local.device, signed=_MOMENTS[moment])
    if numbers is not None:
        for cut in _row_cuts(local, _CHUNK):
            part = _code(local_part(numbers)[cut].to(local.device), moment, row_dims)
            coded.codes[cut] = part.codes
            coded.scales[cut] = part.scales
    return coded


def _decoded_on_host(state: dict[str, Any], moment: str, dtype: torch.dtype) -> Tensor:
    codes = state[f"{moment}.codes"]
    numbers = torch.empty(codes.shape, dtype=dtype)
    for cut in _row_cuts(codes, _CHUNK):
        rows = {key: value[cut] for key, value in state.items() if key.startswith(f"{moment}.")}
        numbers[cut] = _numbers(rows, moment, dtype).cpu()
    return numbers


def _row_cuts(local: Tensor, limit: int) -> list[Any]:
    """Indices that cut a tensor into ranges of rows with about as many elements as the limit."""
    if local.numel() <= limit:
        return [...]
    rows = local.shape[0]
    each = max(1, limit * rows // local.numel())
    return [slice(first, first + each) for first in range(0, rows, each)]


def skip_if(optimizer: torch.optim.Optimizer, bad: Tensor) -> None:
    """Make the next step of a fused optimizer do nothing where `bad` (() bool) is true.

    The decision stays on the device: the host need not wait for it. This is the mechanism by which
    torch's GradScaler skips overflowed steps.
    """
    optimizer.found_inf = bad.float()  # type: ignore[attr-defined]
