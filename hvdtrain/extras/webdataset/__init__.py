"""WebDataset's tar archives of images as data sets: the places of the images are found once, then
each image is read when a sample of it is."""
