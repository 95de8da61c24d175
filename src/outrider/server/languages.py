"""Names of languages by ISO 639-1 code: requests for transcriptions send codes, models read names."""

from __future__ import annotations

CODES = """
af Afrikaans, am Amharic, ar Arabic, as Assamese, az Azerbaijani, ba Bashkir, be Belarusian, bg Bulgarian, bn Bengali,
bo Tibetan, br Breton, bs Bosnian, ca Catalan, cs Czech, cy Welsh, da Danish, de German, el Greek, en English,
eo Esperanto, es Spanish, et Estonian, eu Basque, fa Persian, fi Finnish, fo Faroese, fr French, fy Frisian, ga Irish,
gd Gaelic, gl Galician, gu Gujarati, ha Hausa, haw Hawaiian, he Hebrew, hi Hindi, hr Croatian, ht Haitian Creole,
hu Hungarian, hy Armenian, id Indonesian, ig Igbo, is Icelandic, it Italian, ja Japanese, jw Javanese, jv Javanese,
ka Georgian, kk Kazakh, km Khmer, kn Kannada, ko Korean, ku Kurdish, ky Kyrgyz, la Latin, lb Luxembourgish, ln Lingala,
lo Lao, lt Lithuanian, lv Latvian, mg Malagasy, mi Maori, mk Macedonian, ml Malayalam, mn Mongolian, mr Marathi,
ms Malay, mt Maltese, my Burmese, ne Nepali, nl Dutch, nn Nynorsk, no Norwegian, nb Norwegian, oc Occitan, or Odia,
pa Punjabi, pl Polish, ps Pashto, pt Portuguese, ro Romanian, ru Russian, rw Kinyarwanda, sa Sanskrit, sd Sindhi,
si Sinhala, sk Slovak, sl Slovenian, sn Shona, so Somali, sq Albanian, sr Serbian, st Sesotho, su Sundanese, sv Swedish,
sw Swahili, ta Tamil, te Telugu, tg Tajik, th Thai, tk Turkmen, tl Tagalog, tn Tswana, tr Turkish, tt Tatar, ug Uyghur,
uk Ukrainian, ur Urdu, uz Uzbek, vi Vietnamese, wo Wolof, xh Xhosa, yi Yiddish, yo Yoruba, yue Cantonese, zh Chinese,
zu Zulu
"""
LANGUAGES = dict(entry.split(None, 1) for entry in CODES.split(","))
NAMES = {name.lower(): name for name in (value.strip() for value in LANGUAGES.values())}


def language_name(language: str) -> str | None:
    """The English name of "de", "de-AT" or "German"; None if the language is not in the table."""
    lowered = language.strip().lower()
    code = lowered.replace("_", "-").partition("-")[0]
    name = LANGUAGES.get(code)
    return NAMES.get(lowered) if name is None else name.strip()
