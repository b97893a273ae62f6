"""A Hugging Face dataset with a column of images.   mpirun -np 2 python hugging_face.py"""

import numpy as np
import PIL.Image
from datasets import ClassLabel, Dataset, Features, Image
from sklearn.datasets import load_digits

import hvdtrain


def digits(split):
    pixels, labels = load_digits(return_X_y=True)
    images = [PIL.Image.fromarray(image) for image in (pixels.reshape(-1, 8, 8) * 15).astype(np.uint8)]
    whole = Dataset.from_dict({"image": images, "label": labels}, Features(image=Image(), label=ClassLabel(10)))
    return whole.train_test_split(0.2, seed=0)["train" if split == "train" else "test"]


run = hvdtrain.train({"data.name": digits, "model.name": "linear", "optim.base_lr": 0.05, "epochs": 3})
