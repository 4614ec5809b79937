"""From an official checkpoint to a published model repository, and from there into other tools.

`convert` (mrp-convert), `export` (mrp-export), `serve` (mrp-serve), `quantize`. Loading a model needs none of it.
"""
