"""The reader of compiled programs, on programs whose products and collectives are known by hand."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ddrl_jax.parallel import hlo
from ddrl_jax.parallel import mesh as mesh_lib

ONE = {"replica": 1, "fsdp": 1, "context": 1}
CUBE = {"replica": 2, "fsdp": 2, "context": 2}


def read(f, *shapes, axes=ONE):
    arguments = [s if isinstance(s, jax.ShapeDtypeStruct) else jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
    program = hlo.read(jax.jit(f).lower(*arguments).compile().as_text(), axes)
    assert program.unknown_loops == 0 and not program.uncounted
    return program


def scan(length, step):
    return lambda x, w: jax.lax.scan(lambda x, _: (step(x, w), None), x, None, length=length)[0]


# ---- matrix products -------------------------------------------------------------------------------------------------


def test_a_product_is_two_flops_a_multiplication():
    program = read(lambda x, w: x @ w, (8, 16), (16, 32))
    assert program.flops == 2 * 8 * 16 * 32
    [product] = program.products
    assert (product.contraction, product.outputs, product.loops) == (16, 8 * 32, ())


def test_loops_in_loops_run_their_products_so_often():
    def inner(x, w):
        return jnp.tanh(x @ w)

    program = read(scan(5, scan(7, inner)), (8, 16), (16, 16))
    assert program.flops == 5 * 7 * 2 * 8 * 16 * 16
    assert [p.loops for p in program.products] == [(5, 7)]


def test_a_gradient_through_a_checkpointed_scan():
    def loss(x, w):
        return jnp.sum(scan(6, jax.checkpoint(lambda x, w: jnp.tanh(x @ w), prevent_cse=False))(x, w))

    # Forward, again for the backward pass, and two products of the backward pass itself.
    assert read(jax.grad(loss, argnums=(0, 1)), (8, 16), (16, 16)).flops == 4 * 6 * 2 * 8 * 16 * 16


def test_attention_as_products():
    B, L, N, K = 2, 24, 4, 16

    def attention(q, k, v):
        weights = jax.nn.softmax(jnp.einsum("blnk,bsnk->bnls", q, k))
        return jnp.einsum("bnls,bsnk->blnk", weights, v)

    assert read(attention, *[(B, L, N, K)] * 3).flops == 4 * B * L * L * N * K


def test_a_convolution_counts_what_lies_inside():
    def convolve(x, w):
        return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    # Rows and columns at the edge have two of three taps.
    positions = (3 * 10 - 2) ** 2
    assert read(convolve, (2, 10, 10, 4), (3, 3, 4, 8)).flops == 2 * 2 * positions * 4 * 8


def test_no_products():
    program = read(lambda x, w: jnp.sort(x, axis=0) + w, (8, 16), (8, 16))
    assert program.flops == 0 and program.products == () and program.collectives == ()
    assert not program.fused_attention


# ---- collectives -----------------------------------------------------------------------------------------------------

X = (8, 16, 8)  # on each device (8, 16, 8) cut by eight along the first axis: 128 numbers
LOCAL = 4 * 1 * 16 * 8
KINDS = {
    "all-reduce": (lambda x, axis: jax.lax.psum(x, axis), 1),
    "all-gather": (lambda x, axis: jax.lax.all_gather(x, axis, axis=1, tiled=True), "group"),
    "reduce-scatter": (lambda x, axis: jax.lax.psum_scatter(x, axis, scatter_dimension=1, tiled=True), 1),
    "all-to-all": (lambda x, axis: jax.lax.all_to_all(x, axis, split_axis=1, concat_axis=2, tiled=True), 1),
}


def collectives(f):
    mesh = mesh_lib.make_mesh(2, 2, 2)
    x = jax.ShapeDtypeStruct(X, jnp.float32, sharding=NamedSharding(mesh, P(mesh.axis_names)))
    # Its result is left as it is: what follows would be another collective.
    g = jax.shard_map(f, mesh=mesh, in_specs=P(mesh.axis_names), out_specs=P(mesh.axis_names), check_vma=False)
    return read(g, x, axes=mesh.shape).collectives


@pytest.mark.parametrize("axes", [("replica",), ("fsdp",), ("context",), ("fsdp", "context"), ("replica", "context")])
@pytest.mark.parametrize("kind", KINDS)
def test_a_collective_has_its_kind_axes_and_bytes(kind, axes):
    f, factor = KINDS[kind]
    [found] = collectives(functools.partial(f, axis=axes))
    group = 2 ** len(axes)
    assert (found.kind, found.axes, found.group, found.times) == (kind, axes, group, 1)
    assert found.bytes == LOCAL * (group if factor == "group" else 1)
    ring = found.bytes * (group - 1) / group
    assert found.sent == ring * (2 if kind == "all-reduce" else 1)


def test_a_collective_in_a_loop_counts_every_turn():
    def f(x):
        return jax.lax.scan(lambda x, _: (jnp.sin(jax.lax.psum(x, "context")), None), x, None, length=11)[0]

    [found] = collectives(f)
    assert (found.axes, found.loops, found.times) == (("context",), (11,), 11)
    assert found.body and not collectives(lambda x: jax.lax.psum(x, "context"))[0].body


def test_a_permutation():
    [found] = collectives(lambda x: jax.lax.ppermute(x, "fsdp", [(0, 1), (1, 0)]))
    assert (found.kind, found.axes, found.bytes, found.sent) == ("collective-permute", ("fsdp",), LOCAL, LOCAL)


# ---- what a CPU does not write ---------------------------------------------------------------------------------------


def text(*lines, extra=""):
    return f"HloModule m\n\n{extra}\nENTRY %main (p: f32[8,16]) -> f32[8] {{\n  " + "\n  ".join(lines) + "\n}\n"


Q = "  %q = bf16[2,1024,4,128]{3,2,1,0} parameter(0)"
K = "  %k = bf16[2,512,4,128]{3,2,1,0} parameter(1)"


@pytest.mark.parametrize(
    ("groups", "axes", "group"),
    [
        ("{{0,1},{2,3},{4,5},{6,7}}", ("context",), 2),
        ("{{0,4},{1,5},{2,6},{3,7}}", ("replica",), 2),
        ("{}", ("replica", "fsdp", "context"), 8),
        ("[4,2]<=[8]", ("context",), 2),
        ("[2,4]<=[8]", ("fsdp", "context"), 4),
        ("[4,2]<=[2,4]T(1,0)", ("replica",), 2),
        ("[4,2]<=[2,2,2]T(0,2,1)", ("fsdp",), 2),
        ("mesh['a'=2,'b'=2,'c'=2] {'b'}", ("fsdp",), 2),
        ("mesh['a'=2,'b'=2,'c'=2] {'a','c'}", ("replica", "context"), 4),
        ("mesh['a'=2,'b'=4], device_ids=([2,2,2]T(1,0,2)) {'a'}", ("fsdp",), 2),
        ("mesh['a'=2,'b'=4] {'b':(1)2}", ("fsdp",), 2),
        ("mesh['a'=2,'b'=4] {'b':(2)2}", ("context",), 2),
    ],
)
def test_groups_in_every_notation(groups, axes, group):
    line = f"%r = f32[8,16]{{1,0}} all-reduce(%p), channel_id=1, replica_groups={groups}, use_global_device_ids=true"
    [found] = hlo.read(text("%p = f32[8,16]{1,0} parameter(0)", line + ", to_apply=%add"), CUBE).collectives
    assert (found.axes, found.group, found.bytes) == (axes, group, 4 * 8 * 16)


def test_a_group_of_one_sends_nothing():
    line = "%r = f32[8]{0} all-reduce(%p), replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}, to_apply=%add"
    assert hlo.read(text("%p = f32[8]{0} parameter(0)", line), CUBE).collectives == ()


def test_asynchronous_pairs_count_once():
    program = hlo.read(
        text(
            "%a = bf16[4,16]{1,0} parameter(0)",
            "%b = f32[3]{0} parameter(1)",
            "%s = ((bf16[4,16]{1,0}, f32[3]{0}), (bf16[8,16]{1,0}, f32[6]{0})) all-gather-start(%a, /*index=1*/%b), "
            'replica_groups=[4,2]<=[8], dimensions={0}, metadata={op_name="jit(f)/while/body"}',
            "ROOT %d = (bf16[8,16]{1,0}, f32[6]{0}) all-gather-done(%s)",
        ),
        CUBE,
    )
    [found] = program.collectives
    assert (found.kind, found.shapes, found.bytes) == ("all-gather", ((4, 16), (3,)), 2 * (2 * 4 * 16 + 4 * 3))
    assert found.name == "jit(f)/while/body"


def test_an_asynchronous_wrapper_is_looked_into_once():
    wrapped = """%wrapped (p: f32[8]) -> f32[4] {
  %p = f32[8]{0} parameter(0)
  ROOT %r = f32[4]{0} reduce-scatter(%p), replica_groups=[4,2]<=[8], dimensions={0}, to_apply=%add
}
"""
    program = hlo.read(
        text(
            "%p = f32[8]{0} parameter(0)",
            "%s = ((f32[8]{0}), f32[4]{0}, s32[]) async-start(%p), calls=%wrapped",
            "%u = ((f32[8]{0}), f32[4]{0}, s32[]) async-update(%s), calls=%wrapped",
            "ROOT %d = f32[4]{0} async-done(%u), calls=%wrapped",
            extra=wrapped,
        ),
        CUBE,
    )
    assert [(c.kind, c.times, c.bytes) for c in program.collectives] == [("reduce-scatter", 1, 32)]


LOOP = """%body (t: (s32[], f32[4,4])) -> (s32[], f32[4,4]) {
  %t = (s32[], f32[4,4]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %x = f32[4,4]{1,0} get-tuple-element(%t), index=1
  %y = f32[4,4]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %o = (s32[], f32[4,4]{1,0}) tuple(%i, %y)
}

%condition (t.1: (s32[], f32[4,4])) -> pred[] {
  %t.1 = (s32[], f32[4,4]{1,0}) parameter(0)
  %i.1 = s32[]{:T(128)} get-tuple-element(%t.1), index=0
  %n = s32[]{:T(128)} LIMIT
  ROOT %c = pred[] compare(%i.1, %n), direction=LT
}
"""


@pytest.mark.parametrize(
    ("limit", "config", "times", "unknown"),
    [
        ("constant(13)", "", 13, 0),
        ("constant(13)", ', backend_config={"known_trip_count":{"n":"5"}}', 5, 0),
        ("get-tuple-element(%t.1), index=0", "", 1, 1),
    ],
)
def test_trip_counts(limit, config, times, unknown):
    line = "%w = (s32[], f32[4,4]{1,0}) while(%p), condition=%condition, body=%body" + config
    program = hlo.read(text("%p = (s32[], f32[4,4]{1,0}) parameter(0)", line, extra=LOOP.replace("LIMIT", limit)), ONE)
    assert (program.flops, program.unknown_loops) == (times * 2 * 4**3, unknown)


def test_cublas():
    program = hlo.read(
        text(
            "%a = bf16[3,64,32]{2,1,0} parameter(0)",
            "%b = bf16[3,32,16]{2,1,0} parameter(1)",
            "%c = (f32[3,64,16]{2,1,0}, s8[4194304]{0}) custom-call(%a, %b), "
            'custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":{"alpha_real":1,'
            '"dot_dimension_numbers":{"lhs_contracting_dimensions":["2"],"rhs_contracting_dimensions":["1"],'
            '"lhs_batch_dimensions":["0"],"rhs_batch_dimensions":["0"]},"epilogue":"DEFAULT"}}',
        ),
        ONE,
    )
    [product] = program.products
    assert (product.flops, product.contraction) == (2 * 3 * 64 * 32 * 16, 32) and not program.uncounted


def test_cudnn_attention():
    out = "(bf16[2,4,1024,128]{3,1,2,0}, f32[2,4,1024]{2,1,0}, u8[0]{0})"
    forward = f'%f = {out} custom-call(%q, %k, %k), custom_call_target="__cudnn$fmhaSoftmax"'
    backward = f'%b = {out} custom-call(%q, %k, %k), custom_call_target="__cudnn$fmhaSoftmaxBackward"'
    program = hlo.read(text(Q, K, forward, backward), ONE)
    product = 2 * 2 * 4 * 1024 * 512 * 128  # B N L S K
    assert {p.kind: p.flops for p in program.products} == {
        "attention forward": 2 * product,
        "attention backward": 5 * product,
    }
    assert program.fused_attention


@pytest.mark.parametrize(("dq", "products"), [("bf16[2,1,4,1024,128]", 5), ("f32[640,128]", 4)])
def test_splash_attention(dq, products):
    # Its metadata are written over several lines, the last of which begins with a bracket.
    metadata = (
        'frontend_attributes={kernel_metadata={\n"xprof_metadata":"{}"\n}}, metadata={op_name="jit(f)/pallas_call"}'
    )
    tables, operands = "%m = s8[1,1,1]{2,1,0} constant({...})", "custom-call(%m, %q, %k, %k), "
    kernel = f'custom_call_target="tpu_custom_call", {metadata}'
    program = hlo.read(
        text(
            "%q = bf16[2,4,1024,128]{3,2,1,0} parameter(0)",
            "%k = bf16[2,4,512,128]{3,2,1,0} parameter(1)",
            tables,
            f"%splash_mha_fwd_residuals.1 = (f32[1024,128], bf16[2,4,1024,128]{{3,2,1,0}}) {operands}{kernel}",
            f"%splash_mha_dkv_no_residuals.1 = ({dq}{{0}}, bf16[2,4,512,128]{{3,2,1,0}}) {operands}{kernel}",
            f"%splash_mha_dq.1 = (bf16[2,4,1024,128]{{3,2,1,0}}) {operands}{kernel}",
            "ROOT %d = f32[4]{0} dot(%v, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
        ).replace("  ROOT %d", "  %v = f32[4,8]{1,0} parameter(2)\n  %w = f32[8]{0} parameter(3)\n  ROOT %d"),
        ONE,
    )
    product = 2 * 2 * 4 * 1024 * 512 * 128  # B N L S K
    assert [p.flops for p in program.products] == [2 * product, products * product, 3 * product, 2 * 4 * 8]
    assert [p.kind for p in program.products[:3]] == ["attention forward", "attention backward", "attention backward"]
    assert program.products[0].name == "jit(f)/pallas_call" and not program.uncounted


def test_a_kernel_that_is_not_known_is_said():
    line = '%f = f32[2]{0} custom-call(%q, %k), custom_call_target="my_kernel"'
    assert hlo.read(text(Q, K, line), ONE).uncounted == {"my_kernel": 1}
    line = '%f = f32[2]{0} custom-call(%q), custom_call_target="Sharding"'
    assert hlo.read(text(Q, line), ONE).uncounted == {}


def test_a_batched_product_as_a_tpu_writes_it():
    # The batch of 16 is a spatial axis whose dilation leaves one tap of sixteen inside.
    line = (
        "%c = f32[16,8,32]{2,1,0:T(8,128)} convolution(%a, %b), "
        "window={size=16 stride=15 lhs_dilate=16}, dim_labels=0bf_0io->0bf"
    )
    program = hlo.read(
        text("%a = bf16[16,8,64]{2,1,0:T(8,128)(2,1)} parameter(0)", "%b = bf16[16,64,32]{2,1,0} parameter(1)", line),
        ONE,
    )
    [product] = program.products
    assert (product.flops, product.contraction) == (2 * 16 * 8 * 64 * 32, 64)


def test_it_agrees_with_xla_where_there_is_no_loop():
    def f(x, w):
        return x @ w

    compiled = jax.jit(f).lower(jnp.zeros((30, 40)), jnp.zeros((40, 20))).compile()
    assert hlo.read(compiled.as_text(), ONE).flops == compiled.cost_analysis()["flops"] == 2 * 30 * 40 * 20
