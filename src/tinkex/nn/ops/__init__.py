"""Operations with custom C kernels, and the library that compiles them."""
