"""Draft methods, one file each; importing this package registers them."""

from selfspec.heads import adapter as adapter
from selfspec.heads import blockwise as blockwise
from selfspec.heads import compose as compose
from selfspec.heads import dflash as dflash
from selfspec.heads import draft_model as draft_model
from selfspec.heads import dspark as dspark
from selfspec.heads import eagle as eagle
from selfspec.heads import eagle3 as eagle3
from selfspec.heads import early_exit as early_exit
from selfspec.heads import hydra as hydra
from selfspec.heads import jetspec as jetspec
from selfspec.heads import kangaroo as kangaroo
from selfspec.heads import layer_skip as layer_skip
from selfspec.heads import lookup as lookup
from selfspec.heads import low_rank as low_rank
from selfspec.heads import medusa as medusa
from selfspec.heads import medusa2 as medusa2
from selfspec.heads import mtp as mtp
from selfspec.heads import spec_infer as spec_infer
from selfspec.heads import swift as swift
