"""Sequences that arrive in pieces, and padding, in models that do not use the cache of transformers."""

import copy
import io
import itertools
import pickle

import pytest
import torch
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

import residua
from residua import EDelta, PooledHouseholder, StreamMemory
from residua.connections import PRESETS
from residua.connections.parts import memory as parts_memory
from residua.connections.parts.memory import window_of
from residua.models.cache import memories
from support.tolerances import assert_close
from support.variants import ALL, LOOKING_BACK, bare_sublayers, normal, perturbed

DIM, SUBLAYERS = 8, 4
looking_back = pytest.mark.parametrize("name", LOOKING_BACK)
# A scheme for each part that looks back: for what the memory does, whichever scheme it serves.
each_way_to_look_back = pytest.mark.parametrize(
    "name", ["ddl-tc", "ddl-ec", "beta-conv-dv1", "residual-branch4", "residual-smear", "pooled-householder"]
)
SUB = bare_sublayers(DIM, SUBLAYERS)


def build(name):
    torch.manual_seed(0)
    return perturbed(ALL[name].build(DIM, SUBLAYERS).double())


@torch.no_grad()
@each_way_to_look_back
def test_a_custom_loop_over_the_connections_equals_the_stream(name):
    """As in a decoder of another project, whose layers call one connection each."""
    stream, x, memory = build(name), normal(2, 6, DIM), StreamMemory()
    pieces = []
    for token in x.split(1, 1):
        state = stream.expand(token, memory.of(stream.expand))
        for connection, sublayer in zip(stream.connections, SUB):
            state = connection(state, sublayer, memory=memory)
        pieces.append(stream.collapse(state, memory.of(stream.collapse)))
    assert_close(torch.cat(pieces, 1), stream(x, SUB))


@looking_back
def test_a_single_token_without_a_memory_is_refused(name):
    """A model that decodes token by token would otherwise silently compute wrong numbers."""
    stream, token = build(name), normal(2, 1, DIM)
    with pytest.raises(ValueError, match=r"^memory: .*memory=StreamMemory\(\)"):
        stream(token, SUB)
    for connection in stream.connections:
        if connection.window:
            state = stream.expand(token, StreamMemory().of(stream.expand))
            with pytest.raises(ValueError, match=r"^memory: "):
                connection(state, SUB[0])
    assert stream(token, SUB, memory=StreamMemory()).shape == (2, 1, DIM)


@torch.no_grad()
@each_way_to_look_back
def test_a_loop_over_the_phases_needs_its_memories_as_calls_do(name):
    """Each part that looks back needs its memory, whoever calls it; with all memories, single tokens give the numbers
    of the full pass."""
    stream, x = build(name), normal(2, 4, DIM)
    expected = stream(x, SUB)

    def decode(forgotten):
        memory, pieces = StreamMemory(), []
        own = {part: None if part is forgotten else memory for part in stream.parts}
        for token in x.split(1, 1):
            state = stream.expand(token, own[stream.expand] and memory.of(stream.expand))
            for connection, sublayer in zip(stream.connections, SUB):
                inputs, carry = connection.read(state, own[connection] and memory.of(connection))
                state = connection.write(sublayer(inputs), carry)
            pieces.append(stream.collapse(state, own[stream.collapse] and memory.of(stream.collapse)))
        return torch.cat(pieces, 1)

    assert_close(decode(None), expected)
    for part in stream.parts:
        if window_of(part):
            with pytest.raises(ValueError, match=r"^memory: .*got a single"):
                decode(part)


def saved(what):
    file = io.BytesIO()
    torch.save(what, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def changed(stream):
    for parameter in stream.parameters():
        parameter.data += 0.1
    return stream


COPIES = {"copied": copy.deepcopy, "pickled": lambda what: pickle.loads(pickle.dumps(what)), "saved": saved}


@torch.no_grad()
@each_way_to_look_back
@pytest.mark.parametrize("again", COPIES.values(), ids=COPIES)
def test_a_memory_works_only_with_the_stream_that_it_belongs_to(name, again):
    """It may be copied with its stream, in either order, or by itself. Another stream would silently start anew."""
    stream, x, memory = build(name), normal(2, 5, DIM), StreamMemory()
    expected = stream(x, SUB)[:, 3:]
    stream(x[:, :3], SUB, memory=memory)
    both, swapped = again((stream, memory)), again((memory, stream))[::-1]
    for other, kept in (both, swapped, (stream, again(memory)), (stream, again(again(memory))), again(both)):
        assert_close(other(x[:, 3:], SUB, memory=kept), expected)
    rebuilt = ALL[name].build(DIM, SUBLAYERS).double()
    rebuilt.load_state_dict(stream.state_dict())
    for other in (changed(again(stream)), rebuilt, AveragedModel(stream)):
        with pytest.raises(ValueError, match=r"^memory must .*, got "):
            other(x[:, 3:], SUB, memory=memory)
    memory.reset()
    rebuilt(x, SUB, memory=memory)


@torch.no_grad()
def test_an_averaged_model_has_its_own_memory():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.stream, self.memory = build("ddl-tc"), StreamMemory()

        def forward(self, x):
            return self.stream(x, SUB, memory=self.memory)

    model, x = Model(), normal(2, 5, DIM)
    model(x[:, :3])
    assert_close(AveragedModel(model)(x[:, 3:]), model(x[:, 3:]))


def test_a_pickled_memory_holds_the_last_rows_and_no_weights():
    stream, memory = residua.build("ddl-tc", 64, 2), StreamMemory()
    stream(torch.randn(1, 500, 64), [torch.nn.Identity()] * 2, memory=memory)
    assert len(pickle.dumps(memory)) < 12_000  # three parts with three rows of 64, and the weights are 40,000 bytes
    assert not any(rows.requires_grad for rows in pickle.loads(pickle.dumps(memory))._rows.values())


@torch.no_grad()
def test_a_part_that_missed_a_piece_or_gets_one_twice_is_refused():
    stream, x, memory = build("ddl-tc"), normal(2, 5, DIM), StreamMemory()
    early = residua.Stream(stream.expand, stream.connections[:2], stream.collapse)
    early(x[:, :3], SUB[:2], memory=memory)  # an early exit remembers for its own parts
    assert_close(early(x[:, 3:], SUB[:2], memory=memory.copy()), early(x, SUB[:2])[:, 3:])
    with pytest.raises(ValueError, match=r"^memory: .*got 5 tokens .* 2 in"):
        stream(x[:, 3:], SUB, memory=memory)
    for name in ("ddl-tc", "pooled-householder", "ddl:beta_input=conv", "residual:branch=conv"):
        stream = perturbed(residua.build(name, DIM, SUBLAYERS)).double()
        tied = residua.Stream(stream.expand, [*stream.connections[:2]] * 2, stream.collapse)
        assert tied(x, [*SUB[:2]] * 2).isfinite().all()
        with pytest.raises(ValueError, match=r"^memory must be None .* stands twice"):
            tied(x, [*SUB[:2]] * 2, memory=StreamMemory())


@torch.no_grad()
def test_a_piece_of_another_number_of_sequences_is_refused_with_a_mask_too():
    stream, x = build("ddl-tc"), normal(3, 5, DIM)
    masks = (None, torch.ones(3, 3), torch.tensor([[0, 1, 1]] * 3))
    for first, second in itertools.product(masks, (None, torch.ones(2, 2))):
        memory = StreamMemory()
        stream(x[:, :3], SUB, memory=memory, attention_mask=first)
        with pytest.raises(ValueError, match=r"^memory must have as many sequences as x, got 3 and 2"):
            stream(x[:2, 3:], SUB, memory=memory, attention_mask=second)


@pytest.mark.parametrize("given", ["attention_mask", "documents"])
def test_lists_as_a_tokenizer_returns_them_are_refused_in_one_line(given):
    stream, x = build("ddl-tc"), normal(1, 3, DIM)
    for call in (stream, lambda x, sublayers, **rows: stream.connections[0](stream.expand(x), sublayers[0], **rows)):
        with pytest.raises(TypeError, match=rf"^{given} must be a tensor \(batch, seq\), got \[\[0, 1, 1\]\]; write"):
            call(x, SUB, **{given: [[0, 1, 1]]})


@torch.no_grad()
@each_way_to_look_back
def test_a_copy_continues_independently_and_a_reset_clears_the_memory(name):
    stream, x, memory = build(name), normal(2, 5, DIM), StreamMemory()
    expected = stream(x, SUB)
    stream(x[:, :3], SUB, memory=memory)
    stream(normal(2, 2, DIM, seed=9), SUB, memory=memory.copy())  # tokens that were guessed, and wrong
    for same in (copy.deepcopy(memory), memory):
        assert_close(stream(x[:, 3:], SUB, memory=same), expected[:, 3:])
    memory.reset()
    assert_close(stream(x, SUB, memory=memory), expected)


@torch.no_grad()
@each_way_to_look_back
def test_a_piece_without_tokens_changes_nothing(name):
    stream, x, memory = build(name), normal(2, 5, DIM), StreamMemory()
    pieces = [stream(piece, SUB, memory=memory) for piece in x.split([3, 0, 2], 1)]
    assert_close(torch.cat(pieces, 1), stream(x, SUB))


@each_way_to_look_back
def test_a_mask_that_does_not_match_the_tokens_of_the_call_is_refused(name):
    """Examples are a mask that grows as that of a cache does, and one row for the whole batch."""
    stream, x, memory = build(name), normal(2, 5, DIM), StreamMemory()
    stream(x[:, :3], SUB, memory=memory)
    for piece, shape, kept in [(x[:, 3:4], (2, 4), memory), (x, (1, 5), None), (x, (2, 1), None)]:
        with pytest.raises(ValueError, match=r"mask must be .*, got"):
            stream(piece, SUB, memory=kept, attention_mask=torch.ones(shape))


@each_way_to_look_back
def test_a_memory_that_the_forward_pass_changed_is_refused_in_the_backward_pass(name):
    """An activation checkpoint would read the rows of the last piece as those before the first."""
    stream, x, memory = build(name), normal(2, 6, DIM).requires_grad_(), StreamMemory()
    pieces = [checkpoint(stream, piece, SUB, memory=memory, use_reentrant=False) for piece in x.split(3, 1)]
    with pytest.raises(ValueError, match=r"^memory must be None .*checkpoint"):
        torch.cat(pieces, 1).sum().backward()
    (expected,) = torch.autograd.grad(stream(x, SUB).sum(), x)
    out = checkpoint(lambda x: stream(x, SUB, memory=StreamMemory()), x, use_reentrant=False)  # as nanoGPT samples
    assert_close(torch.autograd.grad(out.sum(), x)[0], expected)


@torch.no_grad()
@each_way_to_look_back
def test_a_piece_with_a_different_number_of_sequences_is_refused(name):
    stream, x, memory = build(name), normal(3, 6, DIM), StreamMemory()
    stream(x[:, :3], SUB, memory=memory)
    with pytest.raises(ValueError, match=r"^memory must have .*, got 3 and 2; "):
        stream(x[:2, 3:], SUB, memory=memory)
    memory.reorder(torch.tensor([0, 1]))
    assert_close(stream(x[:2, 3:], SUB, memory=memory), stream(x[:2], SUB)[:, 3:])


@torch.no_grad()
@each_way_to_look_back
def test_the_memory_of_one_sequence_serves_several_only_if_it_is_repeated(name):
    stream, x, memory = build(name), normal(3, 6, DIM), StreamMemory()
    x[1:, :3] = x[:1, :3]
    stream(x[:1, :3], SUB, memory=memory)
    for end in (4, 6):
        with pytest.raises(ValueError, match=r"^memory must have .*, got 1 and 3; "):
            stream(x[:, 3:end], SUB, memory=copy.deepcopy(memory))
    memory.reorder(torch.zeros(3, dtype=torch.long))
    assert_close(stream(x[:, 3:], SUB, memory=memory), stream(x, SUB)[:, 3:])


@torch.no_grad()
@each_way_to_look_back
def test_beams_are_reordered(name):
    stream, x, memory = build(name), normal(3, 5, DIM), StreamMemory()
    stream(x[:, :3], SUB, memory=memory)
    order = torch.tensor([2, 0, 0, 1])
    memory.reorder(order)
    assert_close(stream(x[order, 3:], SUB, memory=memory), stream(x[order], SUB)[:, 3:])


def test_padding_between_tokens_is_refused():
    stream = PRESETS["ddl-tc"].build(8, 2)
    x, sublayers = torch.randn(2, 5, 8), [torch.nn.Identity()] * 2
    for fine in ([1, 1, 1, 1, 1], [0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [0, 1, 1, 0, 0], [0, 0, 0, 0, 0]):
        stream(x, sublayers, attention_mask=torch.tensor([[1, 1, 1, 1, 1], fine]))
    for gap in ([1, 0, 1, 1, 1], [0, 1, 0, 0, 1]):
        with pytest.raises(ValueError, match=r"^attention_mask must .*, got padding"):
            stream(x, sublayers, attention_mask=torch.tensor([[1, 1, 1, 1, 1], gap]))


HIDE = torch.finfo(torch.float64).min
MASK = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
MASKS = {
    "bool": MASK.bool(),
    "255": (MASK * 255).to(torch.uint8),
    "documents": MASK * torch.tensor([7, 7, 7, -2, -2]),
    "float": MASK.float(),
    "half": MASK.half() / 2,
    "added": torch.zeros(3, 5).masked_fill(MASK == 0, float("-inf")),
    "added, lowest": (1.0 - MASK.double()) * HIDE,
    "added, 10000": ((1 - MASK) * -10000.0).bfloat16(),
    "added, with a bias": torch.full((3, 5), -0.25).masked_fill(MASK == 0, -1e9) - torch.arange(5) / 8,
}


@torch.no_grad()
@each_way_to_look_back
@pytest.mark.parametrize("form", MASKS)
def test_masks_of_all_forms_are_equivalent(name, form):
    """This holds at once, in pieces, and if all are tokens."""
    stream, x, mask = build(name), normal(3, 5, DIM), MASKS[form]
    expected = stream(x, SUB, attention_mask=MASK)[MASK > 0]
    assert torch.equal(stream(x, SUB, attention_mask=mask)[MASK > 0], expected)
    memory = StreamMemory()
    pieces = [stream(x[:, at], SUB, memory=memory, attention_mask=mask[:, at]) for at in (slice(0, 3), slice(3, 5))]
    assert_close(torch.cat(pieces, 1)[MASK > 0], expected)
    if form != "added":
        whole = stream(x[2:], SUB, attention_mask=mask[2:])
        assert torch.equal(whole, stream(x[2:], SUB, attention_mask=MASK[2:]))


@each_way_to_look_back
def test_a_stream_reads_the_numbers_of_a_mask_once(name, monkeypatch):
    """A GPU must finish its work before numbers can be read, so reading them in every part would be slow."""
    read = []
    monkeypatch.setattr(parts_memory, "seen", lambda mask, seen=parts_memory.seen: read.append(mask) or seen(mask))
    build(name)(normal(3, 5, DIM), SUB, attention_mask=MASKS["added"])
    assert len(read) == 1


@each_way_to_look_back
def test_an_ambiguous_mask_is_refused(name):
    stream, x = build(name), normal(2, 5, DIM)
    for wrong in (torch.zeros(2, 5), torch.full((2, 5), float("nan")).copysign(torch.tensor(-1.0))):
        with pytest.raises(ValueError, match="attention_mask must be"):
            stream(x, SUB, attention_mask=wrong)
    for name, shape in {"attention_mask": (2, 1, 5, 5), "documents": (5,)}.items():
        with pytest.raises(ValueError, match=rf"{name} must be \(batch, seq\), got"):
            stream(x, SUB, **{name: torch.ones(shape)})
    stream(x, SUB, attention_mask=torch.zeros(2, 5, dtype=torch.long))


@each_way_to_look_back
def test_numbers_at_padding_reach_no_gradient_of_a_token(name):
    stream, x, tokens = build(name), normal(2, 5, DIM), torch.ones(2, 5, dtype=torch.bool)
    tokens[0, 3:] = False
    gradients = []
    for at_padding in (0.0, float("nan"), float("inf")):
        row = x.masked_fill(~tokens[..., None], at_padding).requires_grad_()
        stream(row, SUB, attention_mask=tokens)[tokens].square().sum().backward()
        gradients.append(row.grad[tokens])
    assert all(torch.equal(gradients[0], other) for other in gradients[1:])


def interrupted(*inputs):
    raise KeyboardInterrupt


@torch.no_grad()
@pytest.mark.parametrize("name", ["residual-ec4", "pooled-householder", "ddl-tc"])
def test_a_piece_can_be_passed_again_after_an_error(name):
    """Some schemes have one part that looks back, or none after the sublayer that raises."""
    stream, x, memory = build(name), normal(2, 6, DIM), StreamMemory()
    pieces = []
    for piece in x.split(2, 1):
        with pytest.raises(KeyboardInterrupt):
            stream(piece, [*SUB[:-1], interrupted], memory=memory)
        pieces.append(stream(piece, SUB, memory=memory))
    assert_close(torch.cat(pieces, 1), stream(x, SUB))


@torch.no_grad()
@pytest.mark.parametrize("name", ["edelta-cumulative", "ddl-tc"])
def test_numbers_that_are_not_finite_stay_in_their_document(name):
    stream, x, documents = build(name), normal(1, 6, DIM), torch.tensor([[0, 0, 0, 1, 1, 1]])
    expected = stream(x, SUB, documents=documents)
    for wrong in (float("nan"), float("inf")):
        x[0, 1, 2] = wrong
        result = stream(x, SUB, documents=documents)
        assert_close(result[:, 3:], expected[:, 3:])
        assert result[0, 1:3].isnan().any()


@torch.no_grad()
@looking_back
def test_numbers_at_padding_reach_no_token(name):
    """NaN and infinity too, at once and in pieces."""
    stream, x = build(name), normal(3, 5, DIM)
    expected = stream(x, SUB, attention_mask=MASK)[MASK > 0]
    for at_padding in (float("nan"), float("inf")):
        row, memory = x.masked_fill(MASK[..., None] == 0, at_padding), StreamMemory()
        assert torch.equal(stream(row, SUB, attention_mask=MASK)[MASK > 0], expected)
        pieces = zip(row.split([2, 3], 1), MASK.split([2, 3], 1))
        parts = [stream(piece, SUB, memory=memory, attention_mask=mask) for piece, mask in pieces]
        assert_close(torch.cat(parts, 1)[MASK > 0], expected)


@each_way_to_look_back
@pytest.mark.parametrize("told", [{"attention_mask": MASK}, {"documents": MASK}, {"attention_mask": MASK.bool()}])
def test_recorded_tensors_may_be_overwritten_before_the_backward_pass(name, told):
    """Loaders reuse their buffers in this way."""
    stream, found = build(name), []
    for overwrite in (False, True):
        x, given = normal(3, 5, DIM).requires_grad_(), {key: value.clone() for key, value in told.items()}
        out = stream(x, SUB, **given)
        for value in given.values() if overwrite else ():
            value.zero_()
        (out[MASK > 0]).square().sum().backward()
        found.append(x.grad)
    assert torch.equal(*found)


@torch.no_grad()
@each_way_to_look_back
def test_document_numbers_may_repeat_in_any_order(name):
    """Neighbours with the same number belong to one document, and padding may stand between documents."""
    stream, x = perturbed(ALL[name].build(DIM, SUBLAYERS).double()), normal(1, 7, DIM)
    apart = torch.cat([stream(piece, SUB, memory=StreamMemory()) for piece in x.split([2, 1, 3, 1], 1)], 1)
    for numbers in ([0, 0, 1, 0, 0, 0, 1], [5, 5, -3, 2, 2, 2, -3], [9, 9, 4, 4.5, 4.5, 4.5, 4]):
        assert_close(stream(x, SUB, documents=torch.tensor([numbers])), apart)
    mask = torch.tensor([[1, 1, 1, 1, 0, 0, 1]])
    padded = stream(x, SUB, documents=torch.tensor([[0, 0, 1, 2, 2, 2, 0]]), attention_mask=mask)
    assert_close(padded[:, mask[0] > 0], apart[:, mask[0] > 0])


@torch.no_grad()
@pytest.mark.parametrize("name", ["ddl-tc", "ddl-ec"])
def test_a_row_that_ended_cannot_continue_in_a_later_piece(name):
    """This holds with a mask or without. Reordering and copying keep the state of each row; a reset clears it."""
    stream, x, memory = build(name), normal(2, 4, DIM), StreamMemory()
    stream(x[:, :1], SUB, memory=memory)
    stream(x[:, :2], SUB, memory=memory, attention_mask=torch.tensor([[1, 1], [1, 0]]))
    memory.reorder(torch.tensor([1, 0]))
    stream(x[:, :1], SUB, memory=memory.copy(), attention_mask=torch.tensor([[0], [1]]))
    for mask in (None, torch.ones(2, 2), torch.tensor([[0, 1], [1, 1]])):
        for kept in (memory, memory.copy()):
            with pytest.raises(ValueError, match=r"^attention_mask must .*, got padding"):
                stream(x[:, 2:], SUB, memory=kept, attention_mask=mask)
    memory.reorder(torch.tensor([1, 1]))
    stream(x[:, 2:], SUB, memory=memory)
    memory.reset()
    assert_close(stream(x, SUB, memory=memory), stream(x, SUB))


@pytest.mark.parametrize("name", ["ddl-tc", "hc", "mhc", "attnres", "residual"])
def test_an_object_that_is_not_a_state_is_refused(name):
    """Examples are the embedding itself and a state of another width."""
    scheme = PRESETS[name]
    stream = scheme.build(8, 2)
    state = stream.expand(torch.randn(2, 5, 8))
    connection = stream.connections[0]
    connection(state, torch.nn.Identity())
    wrong = [torch.randn(2, 5, 6)] if name == "residual" else [torch.randn(2, 5, 8), torch.randn(2, 5, 4, 6)]
    for bare in wrong:
        with pytest.raises(ValueError, match=r"state must be .*, got"):
            connection(bare, torch.nn.Identity())
        with pytest.raises(ValueError, match="state must"):
            connection.read(bare)


@pytest.mark.parametrize("scheme", [EDelta(context="sequence"), PooledHouseholder(context="sequence")])
def test_a_mean_over_the_whole_sequence_ignores_padding_and_refuses_pieces(scheme):
    stream, x = scheme.build(DIM, SUBLAYERS).double(), normal(2, 5, DIM)
    assert_close(stream(x, SUB, attention_mask=torch.ones(2, 5)), stream(x, SUB))
    with pytest.raises(ValueError, match=r"^attention_mask: "):
        stream(x, SUB, attention_mask=torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]]))
    with pytest.raises(ValueError, match=r"^memory must be None"):
        stream(x[:, :2], SUB, memory=StreamMemory())


@pytest.mark.nightly
@pytest.mark.compiler
@torch.no_grad()
@pytest.mark.parametrize("name", ["residual-ec4", "pooled-householder"])
def test_a_compiled_stream_remembers_batches_of_any_size(name):
    stream = build(name)
    torch._dynamo.reset()
    compiled = torch.compile(stream, backend="eager", fullgraph=True)
    for batch in (2, 3):
        x, memory = normal(batch, 4, DIM), StreamMemory()
        pieces = [compiled(piece, SUB, memory=memory) for piece in x.split(2, 1)]
        assert_close(torch.cat(pieces, 1), stream(x, SUB))


@each_way_to_look_back
def test_padding_and_documents_may_lie_on_another_device_than_a_part(name):
    """As in a model on two devices; the meta device stands for the second one, and gives shapes."""
    stream = build(name).to("meta")
    padding, documents = torch.tensor([[False, True, True, True]]), torch.tensor([[0, 0, 1, 1]])
    x = torch.empty(1, 4, DIM, dtype=torch.float64, device="meta")
    parts = [stream.expand, *stream.connections, stream.collapse]
    first, *others = memories(parts, None, padding, documents, num_layers=2)
    state = stream.expand(x, first)
    for connection, memory in zip(stream.connections, others):
        read, carry = connection.read(state, memory)
        state = connection.write(read, carry)
    assert stream.collapse(state, others[-1]).shape == x.shape
    assert stream(x, SUB, attention_mask=padding).shape == x.shape
