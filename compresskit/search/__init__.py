"""Search: from a trained model and a budget to a recipe, the verified file that it makes, and the trade-off of all candidates.

search = compress(model, task, at_most(latency="5ms", drop=0.005), out="runs/small", train=ck.Train(epochs=4))
print(search)          # what was tried, what it cost, what was chosen and why
search.onnx            # the verified file; search.model, search.recipe, search.code, search.curve()

`choose_channels_and_bits(model, batches, file_bytes=...)` chooses the channels and the bits of each layer for one size of the
file, without training.
"""

from compresskit.search.candidate import Candidate
from compresskit.search.ceilings import Ceilings, at_most
from compresskit.search.compress import compress
from compresskit.search.figures import Figures
from compresskit.search.joint import JointPlan, choose_channels_and_bits
from compresskit.search.outcome import Search, Tried

__all__ = ["Candidate", "Ceilings", "Figures", "JointPlan", "Search", "Tried", "at_most", "choose_channels_and_bits", "compress"]
