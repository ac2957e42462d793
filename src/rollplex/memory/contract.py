"""All objects of one step on one device, from the sizes of the model, the rollout and the parallel degrees.

Every record says in `formula` how its bytes come about. Not counted: the device context and the libraries' own buffers,
fragmentation, pixel values and token ids, and the single parameter whose 16-bit gradient waits to be added.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from math import ceil

from rollplex.memory import model_bytes
from rollplex.memory.records import Choice, MemoryRecord, ObjectClass, Policy
from rollplex.memory.step_shape import Hardware, StepShape
from rollplex.memory.timeline import Timeline
from rollplex.schedule.spec import Phase

# Logits that models/logprobs.py holds at once, in elements (a test keeps the two equal), in fp32.
MAX_LOGIT_ELEMENTS = 1 << 24
# Features that models/policy.py keeps of a tower that stands still, in bytes (the same test).
VISION_CACHE_BYTES = 1 << 30
# Tokens that an engine prefills at once: vLLM's default max_num_batched_tokens on large devices.
_PREFILL_TOKENS = 8192
# Megatron-Core's gradient bucket: max(40e6, 1e6 x DP) elements.
_BUCKET_ELEMENTS, _BUCKET_ELEMENTS_PER_RANK = 40_000_000, 1_000_000
_TRAINING = (Phase.ACTOR_PREFIX, Phase.ACTOR_RESPONSE, Phase.PREFIX_BACKWARD, Phase.OPTIMIZER)
_PREFIXES = (Phase.PREFILL, Phase.REF_PREFIX, Phase.ACTOR_PREFIX)
_EVERY = tuple(Phase)


def step_records(
    shape: StepShape, hardware: Hardware, timeline: Timeline, *, varied: bool = True
) -> tuple[MemoryRecord, ...]:
    """The records of one device, in the order in which a reader would tell them.

    varied: prompts and responses may be shorter than `shape` has them, which fills packs and micro-batches better, so
    that each record is the most that any such step holds; off: all are just so long.
    """
    build = _Builder(shape, hardware, timeline, varied)
    records = [*build.weights(), *build.optimizer(), *build.rollout(), *build.boundary(), *build.passes()]
    return tuple(record for record in records if record.nbytes)


@dataclass(frozen=True, slots=True)
class _Builder:
    shape: StepShape
    hardware: Hardware
    timeline: Timeline
    varied: bool

    @property
    def pack_prompts(self) -> int:
        """Prompts of the fullest prefix pass."""
        return self.shape.train_prompts if self.varied else self.shape.pack_prompts

    @property
    def pack_tokens(self) -> int:
        """Tokens of the fullest prefix pass."""
        shape = self.shape
        if not self.varied:
            return shape.pack_prompts * shape.prompt_tokens
        return min(shape.train_prompts * shape.prompt_tokens, max(shape.prompt_tokens, shape.pack_budget_tokens))

    @property
    def pack_visual_tokens(self) -> int:
        """Visual ones of these."""
        return ceil(self.pack_tokens * self.shape.visual_tokens / self.shape.prompt_tokens)

    @property
    def response_batch(self) -> int:
        """Response tokens of the fullest micro-batch."""
        shape = self.shape
        if not self.varied:
            return shape.response_batch
        everything = shape.train_prompts * shape.generations * shape.response_tokens
        return min(everything, max(shape.response_tokens, shape.micro_batch_tokens))

    def weights(self) -> list[MemoryRecord]:
        """The policy in both layouts, and the reference."""
        shape, model = self.shape, self.shape.model
        degrees = {"rollout": shape.rollout_tp, "training": shape.train_tp}
        held = {side: model_bytes.rank_parameters(model, degree).total for side, degree in degrees.items()}
        big, small = ("rollout", "training") if held["rollout"] >= held["training"] else ("training", "rollout")
        records = [
            self._lasting(
                f"actor weights, {big} layout",
                held[big] * shape.dtype_bytes,
                ObjectClass.SNAPSHOT,
                (Phase.PUBLISH, *_EVERY[:-1]),
                f"{held[big]} parameters at TP{degrees[big]} x {shape.dtype_bytes}: the shared backing",
            )
        ]
        if shape.separate_engine:
            records.append(self._second_layout(small, degrees[small]))
        if shape.reference:
            uses = (Phase.REF_PREFIX, Phase.REF_RESPONSE)
            training = held["training"] * shape.dtype_bytes
            visits = self.timeline.visits(uses, lasting=True)
            seconds = visits * training / self.hardware.host_link  # the host copy stays valid: nothing goes back
            offload = Choice(
                Policy.OFFLOAD, self._around(uses, training), seconds, "host copy, mapped while used", training
            )
            formula = f"{held['training']} parameters at TP{shape.train_tp} x {shape.dtype_bytes}"
            records.append(self._lasting("reference weights", training, ObjectClass.PERMANENT, uses, formula, offload))
        return [*records, self._cached_vision()]

    def _cached_vision(self) -> MemoryRecord:
        """Features of towers that stand still; without the cache every prompt is encoded in each step."""
        shape, tower = self.shape, model_bytes.rank_parameters(self.shape.model, 1).vision
        patches = shape.train_prompts * shape.visual_tokens * shape.model.vision.spatial_merge_size**2
        again = Choice(
            Policy.RECOMPUTE, dict.fromkeys(_PREFIXES, 0), 2 * tower * patches / self.hardware.flops, "no cache"
        )
        formula = "features of prompts seen before, dropped beyond a limit"
        name = "cached vision features"
        return self._lasting(name, shape.cached_vision_bytes, ObjectClass.SNAPSHOT, _PREFIXES, formula, again)

    def _second_layout(self, side: str, degree: int) -> MemoryRecord:
        """The same weights in the other layout: a second copy, or views plus the q, k, v that no view can show
        (Megatron interleaves them per KV group, vLLM packs them; DESIGN.md section 4, Weights)."""
        shape = self.shape
        parameters = model_bytes.rank_parameters(shape.model, degree)
        nbytes = parameters.total * shape.dtype_bytes
        # Above the number of KV heads a rank's share is no part of its neighbours' in the other layout.
        unlike = shape.layouts_differ or max(shape.train_tp, shape.rollout_tp) > shape.model.text.num_kv_heads
        rebuilt = parameters.qkv * shape.dtype_bytes if unlike else 0
        rebuild = Choice(
            Policy.REBUILD,
            dict.fromkeys(_EVERY, rebuilt),
            2 * rebuilt / self.hardware.device_memory,
            f"views of the backing; q, k, v ({rebuilt} bytes) rebuilt",
        )
        uses = (Phase.PUBLISH, *(_TRAINING if side == "training" else (Phase.PREFILL, Phase.DECODE)))
        formula = f"{parameters.total} parameters at TP{degree} x {shape.dtype_bytes}"
        return self._lasting(f"actor weights, {side} layout", nbytes, ObjectClass.SNAPSHOT, uses, formula, rebuild)

    def optimizer(self) -> list[MemoryRecord]:
        """Gradients, and what AdamW keeps."""
        shape = self.shape
        parameters = model_bytes.rank_parameters(shape.model, shape.train_tp)
        trained = parameters.total if shape.vision_trained else parameters.text
        wide = max(4, shape.dtype_bytes)
        gradients = trained * wide
        master = 4 if shape.dtype_bytes < 4 else 0
        shards = shape.data_parallel if shape.shard_optimizer else 1
        state = ceil(trained * (master + 2 * wide) / shards)
        uses = (Phase.ACTOR_RESPONSE, Phase.PREFIX_BACKWARD, Phase.OPTIMIZER)
        dropped = Choice(Policy.DISCARD, self._span(uses, gradients), detail="dropped by the optimizer step")
        link = self.hardware.host_link
        out_and_in = 2 * state / link
        offload = Choice(Policy.OFFLOAD, {Phase.OPTIMIZER: state}, out_and_in, "pinned host memory", state)
        chunks = min(state, 2 * shape.stream_chunk_bytes)
        # Both directions run at once; the first chunk's way in and the last one's way out have nothing beside them.
        through = (state + shape.stream_chunk_bytes) / link
        stream = Choice(
            Policy.STREAM, {Phase.OPTIMIZER: chunks}, through, "two chunks at a time from pinned host memory", state
        )
        bucket = max(_BUCKET_ELEMENTS, _BUCKET_ELEMENTS_PER_RANK * shape.data_parallel) * wide
        formulas = (
            f"{trained} trained parameters at TP{shape.train_tp} x {wide}",
            f"{trained} x ({master} master + {2 * wide} moments) / {shards} replicas",
            f"max(40e6, 1e6 x DP{shape.data_parallel}) elements x {wide}",
        )
        local = {Phase.PREFIX_BACKWARD: bucket if shape.data_parallel > 1 else 0}
        return [
            # This process drops them anyway; others may keep their buffers.
            self._local(
                "gradients", {**dropped.held, Phase.ACTOR_RESPONSE: self._early_gradients(gradients)}, formulas[0]
            )
            if shape.local_engine
            else self._lasting("gradients", gradients, ObjectClass.PHASE_LOCAL, uses, formulas[0], dropped),
            self._lasting(
                "optimizer state", state, ObjectClass.PERMANENT, (Phase.OPTIMIZER,), formulas[1], offload, stream
            ),
            self._local("gradient reduction bucket", local, formulas[2]),
        ]

    def _early_gradients(self, nbytes: int) -> int:
        """What gradients add at the fullest moment of the response passes of this process. The first micro-batch finds
        none; where it is its pack's only one, the next pack finds all of them and one pack's activations gone, and at
        the end of a backward they stand where its activations stood."""
        shape = self.shape
        act = shape.activations_of(shape.train_tp, sequence_parallel=shape.sequence_parallel)
        several = self.pack_tokens < shape.train_prompts * shape.prompt_tokens
        if self.pack_prompts * shape.generations * shape.response_tokens > self.response_batch:
            return nbytes
        if several and self.varied:  # the first pack may be of one short prompt
            return nbytes
        freed = act.decoder(self.response_batch, prefix=False)
        if several:
            graph = act.decoder(self.pack_tokens, prefix=True) + self._tower(act, self.pack_visual_tokens)
            freed = min(freed, graph if shape.activations == "graph" else 0)
        return max(0, nbytes - freed)

    def rollout(self) -> list[MemoryRecord]:
        """What the engine needs beside its weights."""
        shape = self.shape
        per_token = model_bytes.kv_bytes_per_token(shape.model, shape.dtype_bytes, shape.rollout_tp)
        tokens = shape.rollout_prompts * (shape.prompt_tokens + shape.generations * shape.response_tokens)
        cached = (
            f"{shape.rollout_prompts} prompts x ({shape.prompt_tokens} + {shape.generations} x "
            f"{shape.response_tokens}) tokens x {per_token} bytes at TP{shape.rollout_tp}"
        )
        if shape.local_engine:
            return self._local_rollout(per_token)
        uses = (Phase.PREFILL, Phase.DECODE)
        released = Choice(Policy.DISCARD, self._span(uses, tokens * per_token), detail="released when decoding ends")
        act = shape.activations_of(shape.rollout_tp, sequence_parallel=False)
        prefill = min(_PREFILL_TOKENS, shape.rollout_prompts * shape.prompt_tokens)
        visual = ceil(prefill * shape.visual_tokens / shape.prompt_tokens)
        layer = max(act.working(prefill), act.working_tower(visual))
        return [
            self._lasting("rollout KV cache", tokens * per_token, ObjectClass.PHASE_LOCAL, uses, cached, released),
            self._local(
                "rollout workspace",
                dict.fromkeys(uses, layer),
                f"one layer of {prefill} prefilled tokens at TP{shape.rollout_tp}",
            ),
        ]

    def _local_rollout(self, per_token: int) -> list[MemoryRecord]:
        """The local engine stacks the keys and values of the prompts whose responses it decodes, and drops all when it
        ends. Waiting responses take the places of those that end, and a prompt stays for its longest: where lengths
        differ, each row may be of another prompt. Then a layer's keys are there twice while they are stacked anew.
        Sampling takes the logits, filtered, and their softmax and its sums in fp64 (rollout/sampling.py)."""
        shape = self.shape
        rows = shape.rollout_rows
        prompts = min(shape.rollout_prompts, rows if self.varied else ceil(rows / shape.generations) + 1)
        cache = (prompts * shape.prompt_tokens + rows * shape.response_tokens) * per_token
        if rows < shape.rollout_prompts * shape.generations:
            cache += prompts * shape.prompt_tokens * per_token // (2 * shape.model.text.num_layers)
        tokens = f"{prompts} prompts x {shape.prompt_tokens} + {rows} rows x {shape.response_tokens}"
        formula = f"({tokens}) tokens x {per_token} bytes at TP{shape.rollout_tp}"
        sampling = rows * shape.model.text.vocab_size * (2 * shape.dtype_bytes + 3 * 8)
        return [
            self._local("rollout KV cache", {Phase.DECODE: cache}, formula),
            self._local("sampling", {Phase.DECODE: sampling}, f"{rows} rows x vocabulary x (2 e + 3 x 8)"),
        ]

    def boundary(self) -> list[MemoryRecord]:
        """Keys, values and last hidden states between the prefix passes and the responses, and their gradients."""
        shape = self.shape
        kv = model_bytes.kv_bytes_per_token(shape.model, shape.dtype_bytes, shape.train_tp)
        hidden = shape.model.text.hidden_size * shape.dtype_bytes
        degree = f"at TP{shape.train_tp}"
        one = (
            self.pack_tokens * kv + self.pack_prompts * hidden,
            f"K, V of a pack of {self.pack_tokens} tokens {degree} + h",
        )
        every = (
            shape.train_prompts * (shape.prompt_tokens * kv + hidden),
            f"{shape.train_prompts} prompts x (K, V of {shape.prompt_tokens} tokens {degree} + h)",
        )
        # In this process, one pack after another is scored, each prefix and its responses together, unless prefixes run
        # ahead beside decoding.
        ahead = self.timeline.position(Phase.REF_PREFIX) == self.timeline.position(Phase.DECODE)
        scored = one if shape.local_engine and not ahead else every
        records = []
        for who, (nbytes, formula), uses in (
            ("reference", scored, (Phase.REF_PREFIX, Phase.REF_RESPONSE)),
            ("actor", every, (shape.prefix_producer, Phase.ACTOR_RESPONSE, Phase.PREFIX_BACKWARD)),
        ):
            if who == "reference" and not shape.reference:
                continue
            others: tuple[Choice, ...] = ()
            visits = self.timeline.visits(uses, lasting=False)
            if visits > 1 and not shape.local_engine:  # the units of one process follow each other too closely
                seconds = 2 * (visits - 1) * nbytes / self.hardware.host_link
                others = (Choice(Policy.OFFLOAD, self._around(uses, nbytes), seconds, "pinned host memory", nbytes),)
            keep = Choice(Policy.KEEP, self._span(uses, nbytes))
            records.append(
                MemoryRecord(f"{who} boundary", nbytes, ObjectClass.BOUNDARY, uses, False, (keep, *others), formula)
            )
        wide = max(4, shape.dtype_bytes)
        elements = one[0] // shape.dtype_bytes
        cast = elements * shape.dtype_bytes if shape.dtype_bytes < wide else 0  # the backward takes them in the dtype
        held = {Phase.ACTOR_RESPONSE: elements * wide, Phase.PREFIX_BACKWARD: elements * wide + cast}
        formula = f"gK, gV, gh of one pack of {self.pack_tokens} tokens x {wide}, cast once for the backward"
        return [*records, self._local("boundary gradients", held, formula)]

    def passes(self) -> list[MemoryRecord]:
        """What the prefix and response passes keep for their backward, and what one layer needs while it runs."""
        shape = self.shape
        act = shape.activations_of(shape.train_tp, sequence_parallel=shape.sequence_parallel)
        pack, batch = self.pack_tokens, self.response_batch
        prefix_layer = act.working(pack, shape.chunk_tokens)
        layer = max(prefix_layer, act.working_tower(self.pack_visual_tokens))
        # Where an eager pass keeps its graph, what a block of the tower needs is in it already.
        graphed = prefix_layer if shape.kernels == "eager" else layer
        forward = graphed if shape.activations == "graph" else layer
        batch_layer = act.working(batch)
        backward = graphed + self._waiting_gradients(pack)
        working = {shape.prefix_producer: forward, Phase.ACTOR_RESPONSE: batch_layer, Phase.PREFIX_BACKWARD: backward}
        if shape.reference:
            working |= {Phase.REF_PREFIX: layer, Phase.REF_RESPONSE: batch_layer}
        text = shape.model.text
        # Scores, their softmax and the gradient of a chunk, and the fp32 gradient of the head's own shard.
        wide = max(4, shape.dtype_bytes)
        rows = max(1, min(batch, MAX_LOGIT_ELEMENTS // text.vocab_size))
        logits = 3 * rows * ceil(text.vocab_size / shape.train_tp) * wide
        head = ceil(text.vocab_size / shape.train_tp) * text.hidden_size * wide
        scoring = {Phase.ACTOR_RESPONSE: logits + head}
        if shape.reference:
            scoring[Phase.REF_RESPONSE] = logits
        gathered = 2 * max(pack, batch) * text.hidden_size * shape.dtype_bytes
        comm = dict.fromkeys(working, gathered) if shape.train_tp > 1 and shape.sequence_parallel else {}
        return [
            self._prefix_activations(act),
            self._local(
                "response activations",
                {Phase.ACTOR_RESPONSE: act.decoder(batch, prefix=False) + act.final(batch)},
                f"{text.num_layers} layers of one micro-batch of {batch} tokens, and its final norm",
            ),
            self._local("logits", scoring, f"3 x {rows} rows x vocabulary x {wide}, and the head's gradient"),
            self._local("layer workspace", working, f"one layer of {pack} prefix or {batch} response tokens"),
            self._local("communication buffers", comm, f"2 gathered hidden states of {max(pack, batch)} tokens"),
        ]

    def _waiting_gradients(self, pack: int) -> int:
        """Weight gradients of one layer of a pack in chunks: autograd hands none on before the last chunk has added its
        own. (Of a whole pass a single parameter's waits, which is not counted.)"""
        shape = self.shape
        if shape.chunk_tokens is None or pack <= shape.chunk_tokens:
            return 0
        decoder = model_bytes.decoder_parameters(shape.model, shape.train_tp)
        return ceil(decoder / shape.model.text.num_layers) * shape.dtype_bytes

    def _prefix_activations(self, act: model_bytes.Activations) -> MemoryRecord:
        """The actor's prefix between its forward and its backward: whole graph, layer inputs, or nothing.

        The backward of layer inputs runs one layer, or the whole vision tower, again; that of nothing a whole pack.
        """
        shape, link = self.shape, self.hardware.host_link
        text = shape.model.text
        tokens, visual = shape.train_prompts * shape.prompt_tokens, shape.train_prompts * shape.visual_tokens
        pack, pack_visual = self.pack_tokens, self.pack_visual_tokens
        uses = (shape.prefix_producer, Phase.PREFIX_BACKWARD)
        per_token = model_bytes.kv_bytes_per_token(shape.model, shape.dtype_bytes, shape.train_tp)
        kv = 0 if shape.kernels == "eager" else per_token
        # Keys and values that the graph saves (fused) are the boundary's own storage.
        graph = act.decoder(tokens, prefix=True) + self._tower(act, visual) - tokens * kv
        inputs = text.num_layers * act.layer_input(tokens) + act.layer_input(visual)
        gone = (text.num_layers - 1) * act.layer_input(pack)  # when the tower runs again, after all layers
        again = max(act.layer(pack, prefix=True), self._tower(act, pack_visual) - gone)
        pack_graph = act.decoder(pack, prefix=True) + self._tower(act, pack_visual)
        pack_inputs = text.num_layers * act.layer_input(pack) + act.layer_input(pack_visual)
        flops = model_bytes.prefix_flops(shape.model, shape.prompt_tokens, shape.visual_tokens)
        once = shape.train_prompts * flops / shape.train_tp / self.hardware.flops
        redo = once if shape.activations == "graph" else 0.0  # else the step without a plan pays it already
        moved = redo + 2 * inputs / link
        checkpoint = self._span(uses, inputs) | {Phase.PREFIX_BACKWARD: inputs + again}
        ways = {
            "graph": (graph, self._span(uses, graph), f"graph of {shape.train_prompts} prompts"),
            "checkpoint": (inputs + again, checkpoint, f"layer inputs of {shape.train_prompts} prompts"),
            "recompute": (pack_graph, {uses[0]: 0, uses[1]: pack_graph}, "one pack's graph in the backward"),
        }
        nbytes, held, formula = ways[shape.activations]
        choices = [Choice(Policy.KEEP, held, detail=shape.activations)]
        if shape.activations == "graph":
            choices.append(Choice(Policy.RECOMPUTE, checkpoint, redo, "checkpoint"))
        if shape.activations != "recompute" and not shape.local_engine:
            away = {uses[0]: 2 * act.layer_input(pack), uses[1]: pack_inputs + again}
            choices.append(
                Choice(Policy.OFFLOAD, away, moved, "checkpoint, layer inputs in pinned host memory", inputs)
            )
        if shape.activations != "recompute":
            choices.append(Choice(Policy.RECOMPUTE, ways["recompute"][1], redo, "recompute"))
        return MemoryRecord("prefix activations", nbytes, ObjectClass.PHASE_LOCAL, uses, False, tuple(choices), formula)

    def _tower(self, act: model_bytes.Activations, visual_tokens: int) -> int:
        """What the vision tower saves: a frozen one nothing."""
        return act.vision(visual_tokens) if self.shape.vision_trained else 0

    def _lasting(  # noqa: PLR0913, PLR0917 - the fields of a record
        self, name: str, nbytes: int, kind: ObjectClass, uses: tuple[Phase, ...], formula: str, *others: Choice
    ) -> MemoryRecord:
        """An object that stays from step to step unless one of `others` says otherwise."""
        keep = Choice(Policy.KEEP, dict.fromkeys(_EVERY, nbytes))
        return MemoryRecord(name, nbytes, kind, uses, True, (keep, *others), formula)

    def _local(self, name: str, held: dict[Phase, int], formula: str) -> MemoryRecord:
        """An object that never outlives a pack, whose bytes are those of its phases."""
        uses = tuple(sorted(held, key=_EVERY.index)) or (Phase.ACTOR_RESPONSE,)
        choice = Choice(Policy.KEEP, held or {Phase.ACTOR_RESPONSE: 0})
        largest = max(held.values(), default=0)
        return MemoryRecord(name, largest, ObjectClass.PHASE_LOCAL, uses, False, (choice,), formula)

    def _around(self, uses: Collection[Phase], nbytes: int) -> dict[Phase, int]:
        """Resident in the segments of `uses` alone."""
        return self._in(self.timeline.positions(uses), nbytes)

    def _span(self, uses: Collection[Phase], nbytes: int) -> dict[Phase, int]:
        """Resident from the first to the last segment of `uses`."""
        return self._in(self.timeline.span(uses), nbytes)

    def _in(self, positions: Collection[int], nbytes: int) -> dict[Phase, int]:
        return {phase: nbytes for number in positions for phase in self.timeline.segments[number]}
