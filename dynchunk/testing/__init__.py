"""Property tests for your own compressor: assertions here, hypothesis strategies in ``strategies``.

The assertions need nothing but torch. ``dynchunk.testing.strategies`` needs hypothesis
(``pip install 'dynchunk[test]'``).
"""

from dynchunk.testing.assertions import (
    assert_causal,
    assert_padding_inert,
    assert_phase_invariant,
    assert_resynchronises,
    assert_streaming_equals_offline,
    sample_text,
)

__all__ = [
    "assert_causal",
    "assert_padding_inert",
    "assert_phase_invariant",
    "assert_resynchronises",
    "assert_streaming_equals_offline",
    "sample_text",
]
