"""Files of labels and of segmentations, in the geometry and order of a scan's file.

`label_files` finds and reads the labels of a scan, with `layer_labels`, `mask_images` and `dicom_seg` for their formats
and `layer_names` for what their names mean. `class_files` writes the classes of voxels. The heads
(`octjepa.tasks.segment`), the segmentation network (`octjepa.tasks.segmenter`) and the viewer use them.
"""
