"""The wire format: what goes in comes out, and nothing else is accepted."""

import io
import json

import numpy as np
import pytest

from ddrl_jax.sidecar import protocol
from ddrl_jax.sidecar.protocol import EnqueueHeader, Limits, ProtocolError, decode_request, encode_request


def npy(array, **kwargs):
    buffer = io.BytesIO()
    np.save(buffer, array, **kwargs)
    return buffer.getvalue()


def body(array, **fields):
    header = {"prompts": ["a"] * len(array), "reward_fn": {"digits": 1.0}} | fields
    return json.dumps(header).encode() + b"\n" + npy(array)


LATENT = np.arange(2 * 4 * 2 * 3 * 2, dtype=np.float32).reshape(2, 4, 2, 3, 2)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", ">f4"])
def test_round_trip(dtype):
    header = EnqueueHeader(prompts=["a seven", "ü\nx"], reward_fn={"digits": 0.5})
    out_header, out = decode_request(encode_request(header, LATENT.astype(dtype)))
    assert out_header == header
    assert out_header.media_type == "latent"  # absent means latent
    np.testing.assert_array_equal(out, LATENT)


def test_fortran_order_arrays_arrive_right():
    _, out = decode_request(body(np.asfortranarray(LATENT)))
    np.testing.assert_array_equal(out, LATENT)


def test_uint8_latents_are_bfloat16():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 3, 1, 4, 6)).astype(np.float32) * 10.0 ** rng.integers(-9, 9, (2, 3, 1, 4, 6))
    x = x.astype(np.float32)
    sent = protocol.to_bfloat16_bytes(x)
    assert sent.dtype == np.uint8 and sent.shape == (2, 3, 1, 4, 12)
    _, out = decode_request(body(sent))
    assert out.shape == x.shape
    np.testing.assert_array_less(np.abs(out - x), np.abs(x) * 2.0**-8)
    again = protocol.from_bfloat16_bytes(protocol.to_bfloat16_bytes(out))
    np.testing.assert_array_equal(again, out)  # bfloat16 values survive exactly


def test_bfloat16_rounds_as_ml_dtypes_does():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = np.random.default_rng(1).normal(size=(1, 1, 1, 64, 64)).astype(np.float32)
    x[0, 0, 0, 0, :3] = [1 + 2.0**-8, 1 + 3 * 2.0**-8, -0.0]  # ties go to even
    expected = x.astype(ml_dtypes.bfloat16).view(np.uint8)
    np.testing.assert_array_equal(protocol.to_bfloat16_bytes(x), expected)


@pytest.mark.parametrize(
    "media_type, shape",
    [("video", (2, 3, 4, 8, 8)), ("image", (2, 8, 8, 3))],
)
def test_media_shapes(media_type, shape):
    header, out = decode_request(body(np.full(shape, 200, np.uint8), media_type=media_type))
    assert header.media_type == media_type and out.dtype == np.uint8 and out.shape == shape


def test_weights_of_zero_and_below_switch_a_scorer_off():
    header, _ = decode_request(body(LATENT, reward_fn={"a": 1, "b": 0, "c": -1}))
    assert header.reward_fn == {"a": 1.0}


class Evil:
    def __reduce__(self):
        return (pytest.fail, ("a pickle was read",))


BAD = {
    "empty": (b"", "newline"),
    "no newline": (b"{}", "newline"),
    "not json": (b"{nope\n", "not JSON"),
    "deep json": (b"[" * 100_000 + b"\n", "not JSON"),
    "not an object": (b"[]\n", "JSON object"),
    "no prompts": (b'{"reward_fn": {"digits": 1}}\n' + npy(LATENT), "prompts"),
    "prompts of numbers": (body(LATENT, prompts=[1, 2]), "prompts"),
    "reward_fn a list": (body(LATENT, reward_fn=["digits"]), "reward_fn"),
    "no scorer wanted": (body(LATENT, reward_fn={"digits": 0}), "reward_fn"),
    "media type": (body(LATENT, media_type="audio"), "media_type"),
    "too few prompts": (body(LATENT, prompts=["a"]), "prompts: 1 of them for a batch of 2"),
    "too few infos": (body(LATENT, video_infos=[{}]), "video_infos"),
    "no array": (body(LATENT)[: body(LATENT).index(b"\n") + 1], "np.save"),
    "garbage array": (b'{"prompts": ["a"], "reward_fn": {"digits": 1}}\nPK\x03\x04', "torch.save"),
    "cut array": (body(LATENT)[:-1], "bytes of data"),
    "long array": (body(LATENT) + b"x", "bytes of data"),
    "wrong rank": (body(LATENT[0]), "shape"),
    "image of rank 5": (body(LATENT, media_type="image"), "shape"),
    "empty axis": (body(LATENT[:, :0]), "empty axis"),
    "int64": (body(LATENT.astype(np.int64)), "dtype"),
    "complex": (body(LATENT.astype(np.complex64)), "dtype"),
    "structured": (body(np.zeros((2, 1, 1, 1, 1), [("a", "f4")])), "dtype"),
    "odd bf16": (body(np.zeros((2, 1, 1, 1, 3), np.uint8)), "odd"),
    "nan": (body(LATENT * np.nan), "not finite"),
    "nan bf16": (body(np.full((2, 1, 1, 1, 2), 255, np.uint8)), "not finite"),
    "video range": (body(LATENT - 5, media_type="video"), r"\[0, 255\]"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_bodies_are_refused_in_one_line(case):
    bad, expected = BAD[case]
    with pytest.raises(ProtocolError, match=expected) as caught:
        decode_request(bad)
    assert "\n" not in str(caught.value) and len(str(caught.value)) <= 300


def test_pickles_are_never_read():
    array = np.empty((2, 1, 1, 1, 1), object)
    array[:] = Evil()
    with pytest.raises(ProtocolError, match="dtype object"):
        decode_request(body(array))


def test_huge_shapes_are_refused_before_memory_is_taken():
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (2, 1000000, 1000000, 1000, 1000)}\n"
    claim = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header
    with pytest.raises(ProtocolError, match="elements") as caught:
        decode_request(b'{"prompts": ["a"], "reward_fn": {"digits": 1}}\n' + claim)
    assert caught.value.status == 413
    with pytest.raises(ProtocolError, match="batch of 2; at most 1"):
        decode_request(body(LATENT), Limits(batch=1))


def test_negative_and_boolean_shapes():
    for shape in ("(-1, 1, 1, 1, 1)", "(True, 1, 1, 1, 1)", "'x'"):
        header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}}}\n".encode()
        claim = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header
        with pytest.raises(ProtocolError):
            decode_request(b'{"prompts": ["a"], "reward_fn": {"digits": 1}}\n' + claim)


def test_one_line():
    assert protocol.one_line("a\nb\t\x1b[31mc") == "a b ?[31mc"
    assert len(protocol.one_line("x" * 1000)) == 300


# --- bodies of torch.save; more of them in test_sidecar_fuzz.py ---


def torch_body(value, **fields):
    torch = pytest.importorskip("torch")
    buffer = io.BytesIO()
    torch.save(value, buffer)
    header = {"prompts": ["a"] * 2, "reward_fn": {"digits": 1.0}} | fields
    return json.dumps(header).encode() + b"\n" + buffer.getvalue()


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "bfloat16"])
def test_a_tensor_by_torch_save(dtype):
    torch = pytest.importorskip("torch")
    tensor = torch.from_numpy(LATENT).to(getattr(torch, dtype))
    _, out = decode_request(torch_body(tensor))
    np.testing.assert_array_equal(out, tensor.double().numpy())
    _, out = decode_request(torch_body(tensor.transpose(1, 4).requires_grad_()))
    np.testing.assert_array_equal(out, tensor.transpose(1, 4).double().numpy())
    assert out.dtype == (np.float32 if dtype == "bfloat16" else dtype)


def test_a_video_by_torch_save():
    torch = pytest.importorskip("torch")
    video = torch.randint(0, 256, (2, 3, 2, 4, 4), dtype=torch.uint8)
    _, out = decode_request(torch_body(video, media_type="Video"))
    np.testing.assert_array_equal(out, video.numpy())
    with pytest.raises(ProtocolError, match="save the bfloat16 tensor itself"):
        decode_request(torch_body(video))


def test_only_a_tensor_by_torch_save():
    torch = pytest.importorskip("torch")
    tensor = torch.from_numpy(LATENT)
    for value, message in [
        ({"x": tensor}, "holds a dict"),
        (Evil(), "it names"),
        (torch.zeros(1).expand(2, 4, 64, 64, 64), "more elements than were sent"),
        (tensor.to_sparse(), "not a tensor|it names|holds"),
        (tensor.int(), "dtype torch.int32"),
        (tensor * float("nan"), "not finite"),
        (tensor[0], "B,C,T,h,w is needed"),
    ]:
        with pytest.raises(ProtocolError, match=message) as caught:
            decode_request(torch_body(value))
        assert "\n" not in str(caught.value)


# --- the rest of cosmos-rl's protocol ---


def test_names_of_cosmos_rls_scorers():
    assert protocol.our_scorer("dance_grpo", ["video_align"]) == "video_align"
    assert protocol.our_scorer("dance_grpo", ["digits"]) == "dance_grpo"  # refused later, by the name that was given
    assert protocol.our_scorer("hpsv2", ["hps_v2", "hpsv2"]) == "hpsv2"  # a scorer of that very name comes first
    answer = {"scores": {"pick_score/overall": [26.0, None], "pick_score/cosine": [0.2, 0.2]}, "type": "pick_score"}
    out = protocol.with_cosmos_keys(answer, "pickscore", "pick_score")
    assert out["scores"] == {"pickscore": [1.0, None], **answer["scores"]} and out["type"] == "pickscore"
    assert protocol.with_cosmos_keys(answer, "pick_score", "pick_score") is answer


def test_every_scorer_that_cosmos_rls_names_stand_for_is_built_in():
    from ddrl_jax.sidecar.scorers import BUILT_IN

    assert {ours for ours, _ in protocol.COSMOS.values()} <= set(BUILT_IN)


def test_pushed_scores():
    text = '{"scores": {"a": [1, NaN, null, "Good"]}, "duration": Infinity, "type": "s"}'
    scorer, answer = protocol.decode_push(text, None)
    assert scorer == "s" and answer["scores"] == {"a": [1, None, None, "Good"]}
    json.dumps(answer, allow_nan=False)
    for bad, message in [("x", "not JSON"), ("[]", "object"), ("{}", "scores"), ('{"scores": {"a": 1}}', "type")]:
        with pytest.raises(ProtocolError, match=message):
            protocol.decode_push(bad, None)
    with pytest.raises(ProtocolError, match=r"scores\.a: a list"):
        protocol.decode_push('{"scores": {"a": 1}}', "s")


def test_latent_attributes():
    assert protocol.decode_latent_attributes('{"fps": 24, "chunk_duration": 81}').fps == 24
    for bad in (
        '{"vae_pth": "x"}',
        '{"device": "cuda"}',
        '{"fps": -1}',
        '{"fps": NaN}',
        '{"load_mean_std": true}',
        "1",
    ):
        with pytest.raises(ProtocolError, match=r"fields|fps|load_mean_std"):
            protocol.decode_latent_attributes(bad)


def test_media_types_as_cosmos_rl_writes_them():
    assert decode_request(body(LATENT, media_type=None))[0].media_type == "latent"
    assert decode_request(body(LATENT, media_type="LATENT"))[0].media_type == "latent"


@pytest.mark.parametrize("fps", [0, -1, "16", None, True, float("nan")])
def test_frame_rates_that_are_none(fps):
    with pytest.raises(ProtocolError, match="video_infos: video_fps is"):
        decode_request(body(LATENT, video_infos=[{"video_fps": fps}] * 2))
