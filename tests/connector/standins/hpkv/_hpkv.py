"""A stand-in for the part in C of the package hpkv."""


class SGL:
    def __init__(self, ptr: int, length: int, handle: int) -> None:
        self.ptr, self.length, self.handle = ptr, length, handle
