"""Tables between a run and `jax-tpu-embedding`, which trains them on the SparseCores of TPUs.

Here are the layout of that package, and the export and import of whole tables with their slots. It does not train, and
does not need the package. Read `layout` first.
"""
