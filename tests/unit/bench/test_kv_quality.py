"""What smaller keys and values gain, of a Llama-8B."""

from bench.kv_quality import _Layer, bytes_of_blocks


def test_a_byte_per_value_nearly_doubles_the_blocks() -> None:
    sizes = bytes_of_blocks([_Layer(8, 128)] * 32)

    assert set(sizes) == {"pool bfloat16", "pool fp8_e4m3", "stored fp8_e4m3", "stored int8"}
    assert all(sizes["pool bfloat16"] / size > 1.98 for name, size in sizes.items() if name != "pool bfloat16")
