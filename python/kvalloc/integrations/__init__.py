"""kvalloc inside other libraries, one package each; none is imported before it is used."""
