"""Operations by Triton kernels: what ``dynchunk_kernels`` launches, registered when first used."""
